"""HALO-Q, every knob (paper section 4.1); and what a plan's broadcasts mean as an outcome."""

from __future__ import annotations

import dataclasses

import numpy as np

from jax_iser._extension import is_loaded, iser
from jax_iser.plan.knobs import COPY_RULES, check_plan_knobs
from jax_iser.plan.types import RESIDENT
from jax_iser.reference import planner as reference
from jax_iser.replay.batch import Batch, Outcome
from jax_iser.replay.policies.base import Policy

# `cpu::ReplayFigure`, in its order.
_COLUMNS = [
    "load_before_max",
    "load_sum",
    "send_off",
    "recv_off",
    "load_max",
    "send",
    "recv",
    "remote_copies",
    "owner_copies",
    "broadcasts",
    "without_owner",
    "slots_used",
    "slots_used_max",
    "replicas_stayed",
]


@dataclasses.dataclass
class HaloQ(Policy):
    """The planner of this package, called once for all plans of a batch.

    `resident=1` keeps a bank of helper slots a layer: a broadcast whose group still holds the
    expert in its very slots moves no data. The other knobs are `jax_iser.plan_counts`'.
    """

    name = "haloq"

    min_group_size: int = 4
    min_routes: int = 0
    gain_threshold: int = 0
    copy_rule: str = "owner_direct"
    resident: int = 0

    def __post_init__(self):
        super().__post_init__()
        check_group_size(self, self.min_group_size)
        self.check("min_routes", self.min_routes, 0)
        self.check("gain_threshold", self.gain_threshold, 0)
        self.check("resident", self.resident, 0, 1)
        if self.copy_rule not in COPY_RULES:
            raise ValueError(f"copy_rule={self.copy_rule!r} is not one of {', '.join(COPY_RULES)}")
        self._bank = self._last = None

    def measure(self, batch: Batch) -> dict[str, np.ndarray] | None:
        """Plans and counts in C++, plan by plan; the same figures as from `plan`."""
        if self.resident or not self.slots or not is_loaded():
            return None
        rule = self._checked_rule(batch)
        shape = (batch.num_layers, batch.num_ranks, self.slots)
        slots = np.empty((len(batch.iterations) + 1, *shape), np.int32)
        slots[0] = -1 if self._last is None else self._last
        figures = np.empty((len(batch.iterations), batch.num_layers, len(_COLUMNS)), np.int32)
        knobs = (self.min_group_size, self.min_routes, self.gain_threshold, rule)
        iser.replay_many(batch.iterations, slots, figures, *knobs)
        self._last = slots[-1]
        columns = dict(zip(_COLUMNS, figures.reshape(-1, len(_COLUMNS)).T, strict=True))
        columns["routes"] = columns.pop("load_sum")
        mean = np.maximum(columns["routes"], 1) / batch.num_ranks
        empty = columns["load_before_max"] == 0
        for name, load in (("imbalance_off", "load_before_max"), ("imbalance", "load_max")):
            columns[name] = np.where(empty, 1.0, columns.pop(load) / mean)
        return columns

    def _checked_rule(self, batch):
        knobs = (self.slots, self.min_group_size, self.min_routes, self.gain_threshold)
        check_plan_knobs(batch.num_ranks, batch.num_experts, *knobs, self.copy_rule)
        return COPY_RULES.index(self.copy_rule)

    def plan(self, batch: Batch) -> Outcome:
        knobs = (self.slots, self.min_group_size, self.min_routes, self.gain_threshold)
        rule = self._checked_rule(batch)
        # The caller's threads are the parallelism, so each call has one.
        rows, quota, before, load = _plan_all(batch.counts, *knobs, rule)
        batch.__dict__.setdefault("load_before", before)
        plan, index = np.nonzero(rows[:, :, 0] >= 0)
        rows, quota = rows[plan, index], quota[plan, index]
        members = group_members(rows, batch.num_ranks)
        slots = helper_table(batch, plan, rows, members, self.slots)
        moved = np.ones(len(plan), bool)
        if self.resident:
            moved = self._not_in_place(batch, plan, rows, members, slots)
        return multicast(batch, plan, rows, quota, load, members, slots, moved)

    def _not_in_place(self, batch, plan, rows, members, slots):
        """`[M] bool`: False for broadcasts that find their expert in every member's slot."""
        held = np.empty_like(slots)
        shape = (batch.num_layers, batch.num_ranks, self.slots)
        bank = np.full(shape, -1, np.int32) if self._bank is None else self._bank
        for iteration in range(batch.num_plans // batch.num_layers):
            span = slice(iteration * batch.num_layers, (iteration + 1) * batch.num_layers)
            held[span] = bank
            bank = np.where(slots[span] >= 0, slots[span], bank)
        self._bank = bank
        there = held[plan, :, rows[:, 4]] == rows[:, :1]
        in_place = (there | ~members).all(axis=1)
        rows[in_place, 5] = RESIDENT
        return ~in_place


def _plan_all(counts, slots, min_group_size, min_routes, gain_threshold, rule):
    """Broadcast rows, quotas, loads before and after, of all plans; slow without the extension."""
    if is_loaded():
        knobs = (slots, min_group_size, min_routes, gain_threshold, rule)
        return iser.plan_many(counts, None, *knobs, 1, False)[:4]
    options = {
        "num_helper_slots": slots,
        "min_group_size": min_group_size,
        "min_routes": min_routes,
        "gain_threshold": gain_threshold,
        "copy_rule": COPY_RULES[rule],
    }
    plans = [reference.plan_counts(each, **options) for each in counts]
    fields = ("broadcasts", "quota", "load_before", "load")
    return tuple(np.stack([getattr(plan, name) for plan in plans]) for name in fields)


def check_group_size(policy: Policy, size: int) -> None:
    """Raises ValueError where `min_group_size` is none that the planner has."""
    if size not in (1, 2, 4):
        raise ValueError(f"{policy.name}:min_group_size={size} is not one of 1, 2, 4")


def group_members(rows, num_ranks):
    """`[M, P] bool` from broadcast rows `[M, 6]`: the ranks of each row's group."""
    size = (num_ranks >> rows[:, 2])[:, None]
    start = rows[:, 3:4] * size
    ranks = np.arange(num_ranks, dtype=rows.dtype)
    return (ranks >= start) & (ranks < start + size)


def helper_table(batch, plan, rows, members, num_slots):
    """`[N, P, S] i32`: the expert that each helper slot holds, -1 for none."""
    num_ranks = batch.num_ranks
    slots = np.full((batch.num_plans, num_ranks, num_slots), -1, np.int32)
    # Flat indices: several times as fast as three index arrays.
    first = plan * (num_ranks * num_slots) + rows[:, 4]
    member = np.flatnonzero(members)
    row, rank = np.divmod(member, num_ranks)
    slots.reshape(-1)[first[row] + rank * num_slots] = rows[row, 0]
    return slots


def multicast(batch, plan, rows, quota, load, members, slots, moved) -> Outcome:
    """The outcome of broadcasts, where a payload leaves its owner once whatever the group."""
    num_plans, num_ranks = batch.num_plans, batch.num_ranks
    inside = members[np.arange(len(plan)), rows[:, 1]]
    received = np.where(moved, members.sum(axis=1) - inside, 0)
    owners = np.bincount((plan * num_ranks + rows[:, 1])[moved], minlength=num_plans * num_ranks)
    return Outcome(
        plan=plan,
        expert=rows[:, 0],
        quota=quota,
        load=load,
        slots=slots,
        owner_copies=owners.reshape(num_plans, num_ranks),
        remote_copies=np.bincount(plan, weights=received, minlength=num_plans),
        broadcasts=np.bincount(plan, minlength=num_plans),
        without_owner=np.bincount(plan[~inside], minlength=num_plans),
    )
