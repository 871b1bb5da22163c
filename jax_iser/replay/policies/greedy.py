"""HALO-Q's placement loop in NumPy, one step of every plan at a time; and the restricted policy.

The C++ planner has no restriction to groups that hold the owner, so that policy is built here.
Without the restriction the loop places what the planner places, which a test asserts.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jax_iser.plan import group_levels
from jax_iser.reference.planner import tournament
from jax_iser.replay.batch import Batch, Outcome
from jax_iser.replay.policies.base import Policy
from jax_iser.replay.policies.haloq import check_group_size, group_members, helper_table, multicast
from jax_iser.replay.split import fill_to


class Exports:
    """Loads and unexported experts of many plans; the step that every greedy planner shares.

    Args:
      batch: the plans.
      limit: home experts that an owner may export, heaviest first, ties to the lower id.
    """

    def __init__(self, batch: Batch, limit: int):
        self.batch, self.limit = batch, min(limit, batch.home)
        self.load = batch.load_before.astype(np.int64)
        self.target = batch.target
        by_owner = batch.totals.reshape(batch.num_plans, batch.num_ranks, batch.home)
        order = np.argsort(-by_owner, axis=2, kind="stable")[:, :, : self.limit]
        self.candidates = order + (np.arange(batch.num_ranks) * batch.home)[:, None]
        self.exported = np.zeros(self.load.shape, np.int64)
        self.frozen = np.zeros(self.load.shape, bool)

    def next(self):
        """The next owner and expert of every plan that still has one, or None.

        Returns:
          Plans `[A]`, owners `[A]`, experts `[A]` and the routes `[A]` that should move.
        """
        while True:
            open_to_export = ~self.frozen & (self.exported < self.limit)
            movable = np.where(open_to_export, self.load, -1)
            owner = movable.argmax(axis=1)
            n = np.flatnonzero(movable.max(axis=1) > self.target)
            if not len(n):
                return None
            owner = owner[n]
            expert = self.candidates[n, owner, self.exported[n, owner]]
            self.exported[n, owner] += 1
            excess = self.load[n, owner] - self.target[n]
            amount = np.minimum(excess, self.batch.totals[n, expert])
            some = amount > 0
            self.freeze(n[~some], owner[~some])
            if some.any():
                return n[some], owner[some], expert[some], amount[some]

    def freeze(self, n, owner):
        """Owners that nothing can be done for."""
        self.frozen[n, owner] = True

    def move(self, n, owner, expert, take):
        """Moves `take [A, P]` routes of the experts off their owners; their quotas `[A, P]`."""
        rows = np.arange(len(n))
        self.load[n] += take
        self.load[n, owner] -= take.sum(axis=1)
        quota = take.copy()
        quota[rows, owner] += self.batch.totals[n, expert] - take.sum(axis=1)
        return quota

    def rows(self, plans, *columns):
        """Steps joined and sorted by plan, placement order kept."""
        if not plans:
            quota = np.empty((0, self.batch.num_ranks), np.int32)
            shaped = [np.empty((0, c[0].shape[1]) if c else 0, np.int32) for c in columns[:-1]]
            return np.empty(0, np.int64), *shaped, quota
        plan = np.concatenate(plans)
        order = np.argsort(plan, kind="stable")
        joined = [np.concatenate(column)[order] for column in columns]
        return plan[order], *joined[:-1], joined[-1].astype(np.int32)


@dataclasses.dataclass
class OwnerGroups(Policy):
    """HALO-Q restricted to groups that hold the owner (paper section 6.1, "Alignment and SAMI")."""

    name = "haloq-owner"

    min_group_size: int = 4
    owner_only: int = 1

    def __post_init__(self):
        super().__post_init__()
        check_group_size(self, self.min_group_size)
        self.check("owner_only", self.owner_only, 0, 1)

    def plan(self, batch: Batch) -> Outcome:
        levels = group_levels(batch.num_ranks, self.min_group_size)
        state = Exports(batch, self.slots)
        free = np.full((batch.num_plans, batch.num_ranks), self.slots)
        plans, rows, quotas = [], [], []
        while self.slots and (step := state.next()) is not None:
            n, owner, expert, amount = step
            level, group, room = self._choose(levels, state, free, n, owner, amount)
            state.freeze(n[room == 0], owner[room == 0])
            some = room > 0
            n, owner, expert, amount = n[some], owner[some], expert[some], amount[some]
            level, group = level[some], group[some]
            size = batch.num_ranks >> level
            members = np.arange(batch.num_ranks) // size[:, None] == group[:, None]
            allowed = members.copy()
            allowed[np.arange(len(n)), owner] = False
            take = fill_to(state.load[n], amount, allowed, state.target[n])
            free[n] -= members
            quotas.append(state.move(n, owner, expert, take))
            plans.append(n)
            rows.append(np.stack([expert, owner, level, group], axis=1))
        plan, rows, quota = state.rows(plans, rows, quotas)
        rows = rows.reshape(len(plan), 4)
        return self._outcome(batch, plan, rows, quota, state.load.astype(np.int32))

    def _choose(self, levels, state, free, n, owner, amount):
        """HALO-Q's choice, the finest level that takes all, else roomiest: level, group, room."""
        room_of = np.maximum(0, state.target[n, None] - state.load[n])
        room_of[np.arange(len(n)), owner] = 0
        best = np.zeros((3, len(n)), np.int64)  # level, group, room
        done = np.zeros(len(n), bool)
        for level in reversed(levels):
            shape = (len(n), level.num_groups, level.group_size)
            admissible = (free[n].reshape(shape) > 0).all(axis=2)
            if self.owner_only:
                admissible &= np.arange(level.num_groups) == (owner // level.group_size)[:, None]
            room = np.where(admissible, room_of.reshape(shape).sum(axis=2), 0)
            group = room.argmax(axis=1)
            found = room[np.arange(len(n)), group]
            better = ~done & (found > best[2])
            best[:, better] = np.stack([np.full(len(n), level.level), group, found])[:, better]
            done |= (found > 0) & (found >= amount)
        return best

    def _outcome(self, batch, plan, placed, quota, load):
        rows = np.full((len(plan), 6), -1, np.int64)
        rows[:, :4] = placed
        members = group_members(rows, batch.num_ranks)
        rows[:, 4] = color(batch, plan, rows, members, self.slots)
        rows = rows.astype(np.int32)
        repair(batch, plan, rows, members, quota)
        slots = helper_table(batch, plan, rows, members, self.slots)
        moved = np.ones(len(plan), bool)
        return multicast(batch, plan, rows, quota, load, members, slots, moved)


def color(batch, plan, rows, members, num_slots):
    """`[M]` helper indices, the lowest free on all members: coarse levels first, then in order."""
    helper = np.zeros(len(plan), np.int64)
    used = np.zeros((batch.num_plans, batch.num_ranks, num_slots), bool)
    order = np.lexsort((np.arange(len(plan)), rows[:, 2], plan))
    ordinal = np.arange(len(plan)) - np.searchsorted(plan[order], plan[order])
    for step in range(ordinal.max(initial=-1) + 1):
        row = order[ordinal == step]
        taken = (used[plan[row]] & members[row][:, :, None]).any(axis=1)
        helper[row] = taken.argmin(axis=1)
        used[plan[row], :, helper[row]] |= members[row]
    return helper


def repair(batch, plan, rows, members, quota):
    """HALO-Q's quota repair on rows `[M]`, in place: trades of quota so that routes stay local."""
    if not len(plan):
        return
    own = batch.counts[plan, :, rows[:, 0]]
    hosts = members.copy()
    hosts[np.arange(len(plan)), rows[:, 1]] = True
    start = np.searchsorted(plan, plan)
    for _ in range(2):
        for a, c in tournament(batch.num_ranks):
            both = np.flatnonzero(hosts[:, a] & hosts[:, c])
            if len(both):
                first = np.flatnonzero(np.diff(start[both], prepend=-1))
                _trade(own, quota, both, first, a, c)
                _trade(own, quota, both, first, c, a)


def _trade(own, quota, both, first, a, c):
    need = np.maximum(0, own[both, a] - quota[both, a])
    take = np.minimum(need, np.maximum(0, quota[both, c] - own[both, c]))
    give = np.maximum(0, quota[both, a] - own[both, a])
    size = np.diff(first, append=len(both))
    traded = np.minimum(np.add.reduceat(take, first), np.add.reduceat(give, first))
    left = np.repeat(traded, size)
    delta = _first_units(take, left, first, size) - _first_units(give, left, first, size)
    quota[both, a] += delta
    quota[both, c] -= delta


def _first_units(amount, limit, first, size):
    """Each segment's amounts in order until their sum reaches the segment's limit."""
    before = np.cumsum(amount) - amount
    before -= np.repeat(before[first], size)
    return np.clip(limit - before, 0, amount)
