"""A greedy planner with point-to-point copies, after UltraEP and MegaFlux (paper section 3.2)."""

from __future__ import annotations

import dataclasses

import numpy as np

from jax_iser.replay.batch import Batch, Outcome
from jax_iser.replay.policies.base import Policy
from jax_iser.replay.policies.greedy import Exports
from jax_iser.replay.split import fill_to


@dataclasses.dataclass
class PointToPoint(Policy):
    """Moves the busiest rank's heaviest experts to the coldest ranks, a copy for each of them.

    As HALO-Q's placement (busiest owner above the water level, its heaviest unexported home
    expert, coldest rank first up to that level) without groups: any rank below the level with a
    free slot may take a replica. An owner may export any number of its home experts.
    `copies_per_owner=0` is no limit.
    """

    name = "p2p"

    copies_per_owner: int = 0

    def __post_init__(self):
        super().__post_init__()
        self.check("copies_per_owner", self.copies_per_owner, 0)

    def plan(self, batch: Batch) -> Outcome:
        num_plans, num_ranks, num_slots = batch.num_plans, batch.num_ranks, self.slots
        state = Exports(batch, batch.home)
        free = np.full((num_plans, num_ranks), num_slots)
        sent = np.zeros((num_plans, num_ranks), np.int64)
        slots = np.full((num_plans, num_ranks, num_slots), -1, np.int32)
        plans, experts, quotas = [], [], []
        while (step := state.next()) is not None:
            n, owner, expert, amount = step
            allowed = free[n] > 0
            allowed[np.arange(len(n)), owner] = False
            level = state.target[n]
            take = fill_to(state.load[n], amount, allowed, level)
            if self.copies_per_owner:
                take = _first_copies(take, state.load[n], self.copies_per_owner - sent[n, owner])
            placed = take.sum(axis=1) > 0
            state.freeze(n[~placed], owner[~placed])
            n, owner, expert, take = n[placed], owner[placed], expert[placed], take[placed]
            row, rank = np.nonzero(take)
            slots[n[row], rank, num_slots - free[n[row], rank]] = expert[row]
            free[n] -= take > 0
            sent[n, owner] += (take > 0).sum(axis=1)
            quotas.append(state.move(n, owner, expert, take))
            plans.append(n)
            experts.append(expert)
        plan, expert, quota = state.rows(plans, experts, quotas)
        copies = sent.sum(axis=1)
        return Outcome(
            plan, expert, quota, state.load.astype(np.int32), slots, sent, copies, copies, copies
        )


@dataclasses.dataclass
class CappedPointToPoint(PointToPoint):
    """The same with at most `copies_per_owner` copies out of an owner, 4 by default."""

    name = "p2p-capped"

    copies_per_owner: int = 4


def _first_copies(take, load, left):
    """Keeps the copies to the coldest `left` ranks of each row, and drops the others."""
    far = np.iinfo(np.int64).max
    order = np.argsort(np.where(take > 0, load, far), axis=1, kind="stable")
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.arange(take.shape[1])[None], axis=1)
    return np.where(place < left[:, None], take, 0)
