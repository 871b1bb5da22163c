"""HALO-Q on counts, in C++ (paper section 4.1); and what a plan looks like to a program."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jax_iser import _iser
from jax_iser.groups import group_levels
from jax_iser.limits import MAX_EXPERTS, MAX_HELPER_SLOTS, MAX_RANKS
from jax_iser.reference.planner import COPY_RULES, CountsPlan

if TYPE_CHECKING:
    import jax  # host plans are made without it: replaying a trace starts at once


class Plan(NamedTuple):
    """What a layer call shows of its plan; alike on all ranks but for `route_slot`.

    Attributes:
      route_slot: `[tokens, top_k] i32`, physical slot of each route, -1 for padding.
      broadcasts: `[P*S, 6] i32`, rows in placement order: expert, owner, level, group index,
        helper index, how (0 owner-direct, 1 SAMI, 2 resident); unused rows -1.
      quota: `[P*S, P] i32`, routes of the row's expert by computing rank.
      num_broadcasts: `[] i32`, rows in use.
      load_before, load: `[P] i32`, routes by computing rank without and with the plan.
      status: `[] i32`, 0 when the call succeeded, else the code of the Domain's error.
      generation: `[] u32`, the Domain's counter of invocations.
    """

    route_slot: jax.Array
    broadcasts: jax.Array
    quota: jax.Array
    num_broadcasts: jax.Array
    load_before: jax.Array
    load: jax.Array
    status: jax.Array
    generation: jax.Array

    @classmethod
    def specs(cls, axis: str) -> Plan:
        """Its `PartitionSpec`s, for the `out_specs` of a `shard_map` over `axis`."""
        from jax.sharding import PartitionSpec

        return cls(PartitionSpec(axis), *[PartitionSpec()] * (len(cls._fields) - 1))


def check_plan_arguments(
    counts, num_helper_slots, min_group_size, min_routes, gain_threshold, copy_rule, resident
):
    """Validates `plan_counts`' arguments; returns the arrays as i32 (`resident` may be None)."""
    counts = np.asarray(counts)
    if counts.ndim != 2 or counts.dtype.kind not in "iu":
        raise ValueError(
            f"counts must be an integer array [ranks, experts], got {counts.dtype} of shape "
            f"{counts.shape}"
        )
    num_ranks, num_experts = counts.shape
    knobs = (num_helper_slots, min_group_size, min_routes, gain_threshold, copy_rule)
    check_plan_knobs(num_ranks, num_experts, *knobs)
    _check_counts(counts)
    if resident is not None:
        resident = np.asarray(resident)
        if resident.dtype.kind not in "iu":
            raise ValueError(f"resident is {resident.dtype}, expected integers")
        if resident.size and not -1 <= resident.min() <= resident.max() < counts.shape[1]:
            raise ValueError(
                f"resident ranges from {resident.min()} to {resident.max()}, expected ids below "
                f"{counts.shape[1]} experts, or -1"
            )
        resident = np.ascontiguousarray(resident, np.int32)
        if resident.shape != (counts.shape[0], num_helper_slots):
            raise ValueError(
                f"resident has shape {resident.shape}, expected (ranks, num_helper_slots) = "
                f"{(counts.shape[0], num_helper_slots)}"
            )
    return np.ascontiguousarray(counts, np.int32), resident


def _check_counts(counts):
    if counts.size and counts.min() < 0:
        raise ValueError(f"counts holds {counts.min()}; numbers of routes are at least 0")
    total = int(counts.sum(dtype=np.float64))
    if total >= 2**31:
        raise ValueError(f"counts sum to {total} routes, the planner takes at most {2**31 - 1}")


def check_plan_knobs(
    num_ranks, num_experts, num_helper_slots, min_group_size, min_routes, gain_threshold, copy_rule
):
    """Raises ValueError, naming value and remedy, for sizes or knobs the planner does not take."""
    if not 1 <= num_ranks <= MAX_RANKS:
        raise ValueError(f"num_ranks={num_ranks} is outside 1..{MAX_RANKS}")
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"num_experts={num_experts} is outside 1..{MAX_EXPERTS}")
    if num_experts % num_ranks:
        raise ValueError(
            f"num_experts={num_experts} is not divisible by the {num_ranks} ranks; pad the experts "
            f"or use a number of ranks that divides {num_experts}"
        )
    if not 0 <= num_helper_slots <= MAX_HELPER_SLOTS:
        raise ValueError(f"num_helper_slots={num_helper_slots} is outside 0..{MAX_HELPER_SLOTS}")
    group_levels(num_ranks, min_group_size)
    for name, value in (("min_routes", min_routes), ("gain_threshold", gain_threshold)):
        if not 0 <= value < 2**31:
            raise ValueError(f"{name}={value} is outside 0..{2**31 - 1}")
    if copy_rule not in COPY_RULES:
        raise ValueError(f"copy_rule={copy_rule!r} is not one of {', '.join(COPY_RULES)}")


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
    """Plans one layer call from the routes each rank has for each expert.

    Deterministic; all ties go to the lower index (paper section 4.1, Algorithm 1).

    Args:
      counts: `[P, E]` integers, routes by source rank and expert; P from 1 to 72, E divisible by
        P and at most 1,024.
      num_helper_slots: helper slots `S` per rank, 0 to 16.
      min_group_size: ranks of the smallest group below the all-rank one: 4, 2 or 1.
      min_routes: a placement that would move fewer routes is skipped.
      gain_threshold: plan nothing while `max load / mean load` is below this many thousandths.
      copy_rule: `"owner_direct"` or `"sami"` for every broadcast, or `"per_slot"`, the paper's mix.
      resident: `[P, S] i32`, the expert that each helper slot holds from an earlier call of this
        layer (-1 for none); broadcasts that find themselves in place are marked resident.

    Returns:
      A `CountsPlan` of NumPy arrays.

    Raises:
      ValueError: on sizes, counts or knobs outside the above, with the value and the remedy.

    Example:
      >>> plan = plan_counts([[90, 10, 10, 10]] * 4, min_group_size=1)
      >>> plan.load_before.tolist(), plan.load.tolist()
      ([360, 40, 40, 40], [120, 120, 120, 120])
    """
    counts, resident = check_plan_arguments(
        counts, num_helper_slots, min_group_size, min_routes, gain_threshold, copy_rule, resident
    )
    knobs = _knobs(num_helper_slots, min_group_size, min_routes, gain_threshold, copy_rule)
    arrays = _iser.plan_many(counts[None], resident, *knobs, 1, False)
    broadcasts, quota, before, load, num_broadcasts, target = (a[0] for a in arrays[:6])
    return CountsPlan(broadcasts, quota, int(num_broadcasts), before, load, int(target))


class PlanBatch(NamedTuple):
    """`plan_many`'s result: `CountsPlan`'s arrays with a leading axis, and the flow.

    Attributes:
      broadcasts: `[N, P*S, 6] i32`.
      quota: `[N, P*S, P] i32`.
      load_before, load: `[N, P] i32`.
      num_broadcasts, target: `[N] i32`.
      flow: `[N, P, P] i64`, routes of source s computed on r; None unless asked for.
    """

    broadcasts: np.ndarray
    quota: np.ndarray
    load_before: np.ndarray
    load: np.ndarray
    num_broadcasts: np.ndarray
    target: np.ndarray
    flow: np.ndarray | None


def plan_many(
    counts,
    *,
    num_helper_slots: int = 4,
    min_group_size: int = 4,
    min_routes: int = 0,
    gain_threshold: int = 0,
    copy_rule: str = "owner_direct",
    with_flow: bool = False,
    num_threads: int | None = None,
) -> PlanBatch:
    """`plan_counts` on `[N, P, E]` count matrices, spread over threads (default: all cores)."""
    counts = np.asarray(counts)
    if counts.ndim != 3 or counts.dtype.kind not in "iu":
        raise ValueError(
            f"counts must be integers [plans, ranks, experts], got {counts.dtype} of shape "
            f"{counts.shape}"
        )
    knobs = _knobs(num_helper_slots, min_group_size, min_routes, gain_threshold, copy_rule)
    _, num_ranks, num_experts = counts.shape
    check_plan_knobs(
        num_ranks,
        num_experts,
        num_helper_slots,
        min_group_size,
        min_routes,
        gain_threshold,
        copy_rule,
    )
    if counts.dtype != np.int32 and counts.size and not 0 <= counts.min() <= counts.max() < 2**31:
        raise ValueError(
            f"counts range from {counts.min()} to {counts.max()}; numbers of routes are at least 0 "
            "and sum to less than 2**31"
        )
    threads = num_threads or os.cpu_count() or 1
    counts = np.ascontiguousarray(counts, np.int32)
    return PlanBatch(*_iser.plan_many(counts, None, *knobs, threads, with_flow))


def _knobs(
    num_helper_slots, min_group_size, min_routes, gain_threshold, copy_rule
) -> tuple[int, int, int, int, int]:
    rule = COPY_RULES.index(copy_rule) if copy_rule in COPY_RULES else -1
    return num_helper_slots, min_group_size, min_routes, gain_threshold, rule


def plan(topk_ids: jax.Array, domain, *, layer=0, weights_version=0, balance="haloq") -> Plan:
    """Plans a call without making it: counts are exchanged, nothing is copied. For tools and tests.

    Args:
      topk_ids: `[tokens, K] i32` of this device; call it inside `shard_map` on every device.
      domain: the device's part of a `DomainHandle`.
      layer, weights_version, balance: as in `moe_layer`.

    Returns:
      The `Plan` that `start` would follow.

    Raises:
      ValueError, TypeError: operands that do not fit the Domain.
    """
    from jax_iser import _ffi
    from jax_iser.fused_moe import plan_results
    from jax_iser.replication import call_params, check_balance, check_handle, check_tokens

    check_handle(domain)
    check_balance(balance)
    check_tokens("topk_ids", topk_ids, domain.config.top_k, domain.config, "int32")
    params = call_params(layer, weights_version, balance, domain.config)
    results = plan_results(domain.config, topk_ids.shape)
    operands = (domain.words, params, topk_ids)
    route_slot, *common = _ffi.call("plan", domain.config, results, *operands)
    return Plan(*_ffi.varying_like(topk_ids, (route_slot,)), *common)
