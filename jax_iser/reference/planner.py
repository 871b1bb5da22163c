"""NumPy twin of the HALO-Q planner: the oracle that C++ and CUDA plans equal bit for bit.

One function a stage, in the order of the paper's Algorithm 1. Everything is integer arithmetic;
sums are taken in int64. `jax_iser.plan` is the fast version of `plan_counts`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jax_iser.plan.groups import group_levels
from jax_iser.plan.knobs import COPY_RULES as COPY_RULES
from jax_iser.plan.knobs import check_plan_arguments
from jax_iser.plan.types import OWNER_DIRECT, RESIDENT, SAMI, CountsPlan


class _Broadcast(NamedTuple):
    expert: int
    owner: int
    level: int
    group: int
    members: range


def histogram(topk_ids: np.ndarray, num_experts: int) -> np.ndarray:
    """Stage 1: routes per expert, `[E] i32`; ids outside `[0, E)` are padding and not counted."""
    ids = np.asarray(topk_ids).reshape(-1)
    valid = ids[(ids >= 0) & (ids < num_experts)]
    return np.bincount(valid, minlength=num_experts).astype(np.int32)


def _candidates(totals, owner, home, num_slots):
    """The owner's `min(S, H)` heaviest home experts, heaviest first, ties to the lower id."""
    experts = range(owner * home, (owner + 1) * home)
    return sorted(experts, key=lambda e: (-int(totals[e]), e))[: min(num_slots, home)]


def _room(load, members, owner, target):
    return sum(max(0, target - int(load[r])) for r in members if r != owner)


def _choose_group(load, free, owner, amount, target, levels):
    """The finest level's roomiest admissible group that takes `amount`, else the roomiest seen."""
    best: tuple = (0, None, None)
    for level in reversed(levels):
        level_best: tuple = (0, None, None)
        for group in range(level.num_groups):
            members = level.members(group)
            if all(free[r] > 0 for r in members):
                room = _room(load, members, owner, target)
                if room > level_best[0]:
                    level_best = (room, level, group)
        if level_best[0] > best[0]:
            best = level_best
        if level_best[1] is not None and level_best[0] >= amount:
            return level_best
    return best


def place(totals, load, num_slots, levels, target, min_routes):
    """Stage 2: broadcasts in placement order, their quotas, and the loads after them."""
    num_ranks, home = len(load), len(totals) // len(load)
    load, free = load.astype(np.int64).copy(), np.full(num_ranks, num_slots)
    candidates: dict[int, list[int]] = {}
    frozen = np.zeros(num_ranks, bool)
    broadcasts: list = []
    quotas: list = []
    while True:
        movable = np.where(frozen, 0, load)
        owner = int(np.argmax(movable))
        if movable[owner] <= target:
            return broadcasts, quotas, load
        if owner not in candidates:
            candidates[owner] = _candidates(totals, owner, home, num_slots)
        if not candidates[owner]:
            frozen[owner] = True
            continue
        expert = candidates[owner].pop(0)
        amount = int(min(load[owner] - target, totals[expert]))
        room, level, group = _choose_group(load, free, owner, amount, target, levels)
        if amount == 0 or level is None:
            frozen[owner] = True
            continue
        if min(amount, room) < min_routes:
            continue
        members = level.members(group)
        quota = np.zeros(num_ranks, np.int64)
        left = amount
        for rank in sorted((r for r in members if r != owner), key=lambda r: (int(load[r]), r)):
            moved = min(left, max(0, target - int(load[rank])))
            quota[rank] = moved
            load[rank] += moved
            left -= moved
        load[owner] -= amount - left
        quota[owner] = totals[expert] - (amount - left)
        free[list(members)] -= 1
        broadcasts.append(_Broadcast(expert, owner, level.level, group, members))
        quotas.append(quota)


def color_slots(broadcasts, num_ranks, num_slots):
    """Stage 3: a helper index free on all members; coarse levels first, then placement order."""
    used = np.zeros((num_ranks, num_slots), bool)
    helper = [-1] * len(broadcasts)
    for index in sorted(range(len(broadcasts)), key=lambda i: (broadcasts[i].level, i)):
        members = list(broadcasts[index].members)
        slot = int(np.argmin(used[members].any(axis=0)))
        assert not used[members, slot].any(), "aligned groups always leave a common free slot"
        used[members, slot] = True
        helper[index] = slot
    return helper


def tournament(num_ranks):
    """Circle-method pairs, ring by ring; the pairs of a ring are disjoint."""
    n = num_ranks + num_ranks % 2
    for t in range(n - 1):
        ring = [n - 1] + [(t + j) % (n - 1) for j in range(n - 1)]
        for i in range(n // 2):
            a, c = ring[i], ring[n - 1 - i]
            if a < num_ranks and c < num_ranks:
                yield a, c


def _trade(counts, broadcasts, quotas, shared, a, c):
    """One direction: `a` takes quota that its own routes need and gives what they do not."""
    need_spare, own_spare = [], []
    for b in shared:
        expert, quota = broadcasts[b].expert, quotas[b]
        need = max(0, int(counts[a, expert]) - int(quota[a]))
        need_spare.append(min(need, max(0, int(quota[c]) - int(counts[c, expert]))))
        own_spare.append(max(0, int(quota[a]) - int(counts[a, expert])))
    traded = min(sum(need_spare), sum(own_spare))
    take_left = give_left = traded
    for b, take, give in zip(shared, need_spare, own_spare, strict=True):
        take, give = min(take, take_left), min(give, give_left)
        quotas[b][a] += take - give
        quotas[b][c] += give - take
        take_left -= take
        give_left -= give


def repair(counts, broadcasts, quotas):
    """Stage 4, in place: trade quota between hosts so that routes stay on their source rank."""
    num_ranks = counts.shape[0]
    hosted = [
        {i for i, b in enumerate(broadcasts) if r in b.members or r == b.owner}
        for r in range(num_ranks)
    ]
    for _ in range(2):
        for a, c in tournament(num_ranks):
            shared = sorted(hosted[a] & hosted[c])
            if shared:
                _trade(counts, broadcasts, quotas, shared, a, c)
                _trade(counts, broadcasts, quotas, shared, c, a)


def _is_pure(broadcasts, index):
    """Whether every broadcast that meets the group targets exactly it, with its owner inside."""
    target = broadcasts[index].members
    return all(
        b.members == target and b.owner in target
        for b in broadcasts
        if b.members.start < target.stop and target.start < b.members.stop
    )


def copy_ways(broadcasts, helper, copy_rule, resident=None):
    """How each broadcast is copied (paper section 4.3): the code of the `how` column."""
    widest: dict[int, int] = {}
    for i, b in enumerate(broadcasts):
        if b.owner in b.members:
            best = widest.setdefault(b.owner, i)
            if len(b.members) > len(broadcasts[best].members):
                widest[b.owner] = i
    ways = []
    for i, b in enumerate(broadcasts):
        if resident is not None and (resident[list(b.members), helper[i]] == b.expert).all():
            ways.append(RESIDENT)
        elif copy_rule != "per_slot":
            ways.append(OWNER_DIRECT if copy_rule == "owner_direct" else SAMI)
        elif b.owner in b.members and (_is_pure(broadcasts, i) or widest[b.owner] == i):
            ways.append(OWNER_DIRECT)
        else:
            ways.append(SAMI)
    return ways


def plan_counts(
    counts,
    *,
    num_helper_slots: int = 4,
    min_group_size: int = 4,
    min_routes: int = 0,
    gain_threshold: int = 0,
    copy_rule: str = "owner_direct",
    resident=None,
) -> CountsPlan:
    """HALO-Q on the counts `[P, E] i32` of routes by source rank and expert.

    Same arguments, result and errors as `jax_iser.plan.plan_counts`; see there.
    """
    counts, resident = check_plan_arguments(
        counts, num_helper_slots, min_group_size, min_routes, gain_threshold, copy_rule, resident
    )
    num_ranks = len(counts)
    totals = counts.sum(axis=0, dtype=np.int64)
    before = totals.reshape(num_ranks, -1).sum(axis=1)
    total = int(before.sum())
    target = -(-total // num_ranks)
    broadcasts, quotas, load = [], [], before
    gains = 1000 * num_ranks * int(before.max()) >= gain_threshold * total
    if num_helper_slots > 0 and gains:
        levels = group_levels(num_ranks, min_group_size)
        broadcasts, quotas, load = place(
            totals, before, num_helper_slots, levels, target, min_routes
        )
    helper = color_slots(broadcasts, num_ranks, num_helper_slots)
    repair(counts, broadcasts, quotas)
    ways = copy_ways(broadcasts, helper, copy_rule, resident)
    rows = np.full((num_ranks * num_helper_slots, 6), -1, np.int32)
    quota = np.zeros((num_ranks * num_helper_slots, num_ranks), np.int32)
    for i, b in enumerate(broadcasts):
        rows[i] = b.expert, b.owner, b.level, b.group, helper[i], ways[i]
        quota[i] = quotas[i]
    return CountsPlan(
        rows, quota, len(broadcasts), before.astype(np.int32), load.astype(np.int32), target
    )


def flow(counts, plan: CountsPlan) -> np.ndarray:
    """Stage 5 as counts: `[P, P] i64`, routes of source `s` that rank `r` computes."""
    counts = np.asarray(counts)
    num_ranks = counts.shape[0]
    result = np.zeros((num_ranks, num_ranks), np.int64)
    moved = set()
    for row, quota in zip(plan.broadcasts, plan.quota, strict=True):
        if row[0] < 0:
            break
        moved.add(int(row[0]))
        kept = np.minimum(counts[:, row[0]], quota)
        result[np.arange(num_ranks), np.arange(num_ranks)] += kept
        surplus, spare = counts[:, row[0]] - kept, quota - kept
        starts, stops = np.cumsum(surplus) - surplus, np.cumsum(surplus)
        opens, closes = np.cumsum(spare) - spare, np.cumsum(spare)
        overlap = np.minimum(stops[:, None], closes) - np.maximum(starts[:, None], opens)
        result += np.maximum(overlap, 0)
    home = counts.shape[1] // num_ranks
    for expert in set(range(counts.shape[1])) - moved:
        result[:, expert // home] += counts[:, expert]
    return result


def rewrite(topk_ids, counts, plan: CountsPlan, rank: int, num_helper_slots: int) -> np.ndarray:
    """Stage 5 for source `rank`: `route_slot`, `topk_ids`' shape, i32 physical slots, -1 padding.

    Of a broadcast's expert each rank keeps its first routes, in (token, k) order, up to its quota;
    the surplus of all ranks, in rank order, fills the hosts' spare quota in rank order. Members
    compute in the helper slot, the owner in its home slot.
    """
    counts = np.asarray(counts)
    num_ranks, num_experts = counts.shape
    home = num_experts // num_ranks
    stride = home + num_helper_slots
    ids = np.asarray(topk_ids).reshape(-1).astype(np.int64)
    valid = (ids >= 0) & (ids < num_experts)
    slots = np.where(valid, ids // home * stride + ids % home, -1)
    for row, quota in zip(plan.broadcasts, plan.quota, strict=True):
        expert, owner, _, _, helper, _ = (int(v) for v in row)
        if expert < 0:
            break
        kept = np.minimum(counts[:, expert], quota)
        surplus, spare = counts[:, expert] - kept, (quota - kept).astype(np.int64)
        hosts = np.repeat(np.arange(num_ranks), spare)
        start = int(surplus[:rank].sum())
        mine = np.concatenate(
            [np.full(kept[rank], rank), hosts[start : start + int(surplus[rank])]]
        )
        physical = np.where(
            mine == owner, owner * stride + expert % home, mine * stride + home + helper
        )
        slots[np.flatnonzero(ids == expert)] = physical
    return slots.reshape(np.shape(topk_ids)).astype(np.int32)
