"""DeepSeek's EPLB rule in NumPy: static replicas from past loads (github.com/deepseek-ai/EPLB)."""

from __future__ import annotations

import numpy as np


def balanced_packing(weight: np.ndarray, num_packs: int) -> tuple[np.ndarray, np.ndarray]:
    """Packs n items into packs of equal size, heaviest first, each into the lightest open pack.

    Args:
      weight: `[X, n]`, n a multiple of `num_packs`.

    Returns:
      Pack and place within it of each item, both `[X, n] i64`; ties to the lower pack, and equal
      items in index order.
    """
    rows, items = weight.shape
    if items % num_packs:
        raise ValueError(f"{items} items do not fill {num_packs} packs of equal size")
    size = items // num_packs
    if size == 1:
        return np.tile(np.arange(items), (rows, 1)), np.zeros((rows, items), np.int64)
    order = np.argsort(-weight, axis=1, kind="stable")
    pack, place = np.empty((2, rows, items), np.int64)
    load, held = np.zeros((rows, num_packs)), np.zeros((rows, num_packs), np.int64)
    row = np.arange(rows)
    for item in order.T:
        chosen = np.where(held < size, load, np.inf).argmin(axis=1)
        pack[row, item], place[row, item] = chosen, held[row, chosen]
        load[row, chosen] += weight[row, item]
        held[row, chosen] += 1
    return pack.astype(np.int64), place.astype(np.int64)


def replicate(weight: np.ndarray, num_slots: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gives each spare slot to the expert with most weight per replica, ties to the lower id.

    Args:
      weight: `[X, n]`; num_slots: at least n.

    Returns:
      Expert `[X, num_slots]` and replica rank `[X, num_slots]` of each slot, and replicas `[X, n]`.
    """
    rows, items = weight.shape
    expert = np.tile(np.arange(num_slots), (rows, 1))
    rank = np.zeros((rows, num_slots), np.int64)
    count = np.ones((rows, items), np.int64)
    row = np.arange(rows)
    for slot in range(items, num_slots):
        chosen = (weight / count).argmax(axis=1)
        expert[:, slot], rank[:, slot] = chosen, count[row, chosen]
        count[row, chosen] += 1
    return expert, rank, count


def _inverse(permutation):
    inverse = np.empty_like(permutation)
    np.put_along_axis(inverse, permutation, np.arange(permutation.shape[1])[None], axis=1)
    return inverse


def rebalance_experts(
    weight: np.ndarray, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """EPLB: expert groups to nodes, replicas within nodes, replicas to GPUs.

    Args:
      weight: `[L, E]` loads.
      num_replicas: physical slots in all, a multiple of `num_gpus`, at least E.
      num_groups: expert groups; used only where they divide evenly over the nodes.
      num_nodes, num_gpus: the machine; GPUs divide evenly over the nodes.

    Returns:
      i64 arrays `phy2log [L, num_replicas]`, `log2phy [L, E, max replicas]` (-1 pads) and
      `logcnt [L, E]`.

    Raises:
      ValueError: on sizes that do not divide.
    """
    weight = np.asarray(weight, np.float64)
    layers, experts = weight.shape
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    for what, of, by in (
        ("num_replicas", num_replicas, num_gpus),
        ("num_gpus", num_gpus, num_nodes),
        ("experts", experts, num_groups),
    ):
        if of % by:
            raise ValueError(f"{what}={of} is not divisible by {by}")
    if num_replicas < experts:
        raise ValueError(f"num_replicas={num_replicas} is below the {experts} experts")
    group_size = experts // num_groups
    node_experts, node_slots = experts // num_nodes, num_replicas // num_nodes
    gpus = num_gpus // num_nodes
    tokens = weight.reshape(layers, num_groups, group_size).sum(axis=2)
    node, place = balanced_packing(tokens, num_nodes)
    # Logical experts in node order, group by group.
    start = (node * (num_groups // num_nodes) + place) * group_size
    log2mlog = (start[:, :, None] + np.arange(group_size)).reshape(layers, experts)
    mlog2log = _inverse(log2mlog)
    by_node = np.take_along_axis(weight, mlog2log, axis=1).reshape(-1, node_experts)
    expert, rank, count = replicate(by_node, node_slots)
    per_slot = np.take_along_axis(by_node / count, expert, axis=1)
    gpu, place = balanced_packing(per_slot, gpus)
    order = _inverse(gpu * (node_slots // gpus) + place)
    phy2mlog = np.take_along_axis(expert, order, axis=1).reshape(layers, num_nodes, node_slots)
    phy2mlog += (np.arange(num_nodes) * node_experts)[None, :, None]
    phy2log = np.take_along_axis(mlog2log, phy2mlog.reshape(layers, -1), axis=1)
    phyrank = np.take_along_axis(rank, order, axis=1).reshape(layers, -1)
    logcnt = np.take_along_axis(count.reshape(layers, -1), log2mlog, axis=1)
    log2phy = np.full((layers, experts, logcnt.max()), -1, np.int64)
    row = np.arange(layers)[:, None]
    log2phy[row, phy2log, phyrank] = np.arange(num_replicas)
    return phy2log, log2phy, logcnt
