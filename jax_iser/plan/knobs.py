"""The knobs of the planner and what it takes: every planner and every Domain checks them here."""

from __future__ import annotations

import numpy as np

from jax_iser.limits import MAX_EXPERTS, MAX_HELPER_SLOTS, MAX_RANKS
from jax_iser.plan.groups import group_levels

COPY_RULES = ("per_slot", "owner_direct", "sami")


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
