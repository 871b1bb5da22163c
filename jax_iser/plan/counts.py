"""HALO-Q on counts, in C++ (paper section 4.1)."""

from __future__ import annotations

import os

import numpy as np

from jax_iser._extension import iser
from jax_iser.plan.knobs import COPY_RULES, check_plan_arguments, check_plan_knobs
from jax_iser.plan.types import CountsPlan, PlanBatch


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
    arrays = iser.plan_many(counts[None], resident, *knobs, 1, False)
    broadcasts, quota, before, load, num_broadcasts, target = (a[0] for a in arrays[:6])
    return CountsPlan(broadcasts, quota, int(num_broadcasts), before, load, int(target))


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
    return PlanBatch(*iser.plan_many(counts, None, *knobs, threads, with_flow))


def _knobs(
    num_helper_slots, min_group_size, min_routes, gain_threshold, copy_rule
) -> tuple[int, int, int, int, int]:
    rule = COPY_RULES.index(copy_rule) if copy_rule in COPY_RULES else -1
    return num_helper_slots, min_group_size, min_routes, gain_threshold, rule
