"""NumPy twin of the replication: which bytes each helper slot holds after a plan."""

from __future__ import annotations

import numpy as np

from jax_iser.experts.bundle import PLANE_ALIGN
from jax_iser.plan.groups import group_levels
from jax_iser.plan.types import RESIDENT


def replicate(broadcasts, weights, *, num_ranks, num_helper_slots, min_group_size=4):
    """The helper slots that a plan's copies fill.

    Every member of a broadcast's group but the owner, which computes at home, gets the expert's
    bundle in the broadcast's helper index. Resident broadcasts move nothing and are left out.

    Args:
      broadcasts: `[P*S, 6] i32`, as in `CountsPlan`.
      weights: the planes of all experts, `[E, ...]`, None for biases that are not there.
      num_ranks, num_helper_slots, min_group_size: as the plan was made with.

    Returns:
      `{(rank, helper index): bytes}`: the expert's planes, in the order of the calls' operands,
      each padded with zeros to a multiple of 128 bytes.
    """
    levels = group_levels(num_ranks, min_group_size)
    slots: dict[tuple[int, int], bytes] = {}
    for expert, owner, level, group, helper, how in np.asarray(broadcasts).tolist():
        if expert < 0:
            break
        if how == RESIDENT:
            continue
        planes = (plane for plane in weights if plane is not None)
        parts = (np.ascontiguousarray(plane[expert]).tobytes() for plane in planes)
        bundle = b"".join(part + bytes(-len(part) % PLANE_ALIGN) for part in parts)
        for rank in levels[level].members(group):
            if rank != owner:
                assert (rank, helper) not in slots, "two broadcasts share a helper slot"
                slots[rank, helper] = bundle
    return slots
