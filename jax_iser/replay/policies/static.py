"""Static replicas by the EPLB rule with an even split, and LPLB's re-split over them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jax_iser.replay.batch import Batch, Outcome, no_copies
from jax_iser.replay.eplb import rebalance_experts
from jax_iser.replay.policies.base import Policy
from jax_iser.replay.split import even_split, water_fill


@dataclasses.dataclass
class StaticPast(Policy):
    """EPLB from the loads of the iterations before, rebuilt every `interval` iterations.

    Every rank holds `E/P + slots` experts of EPLB's choice, home or not. The first iteration has no
    past and runs at home. `window` counts the iterations whose loads are used, 0 for all. Replicas
    are moved between iterations, so nothing is copied within a layer.
    """

    name = "eplb-past"

    interval: int = 10
    window: int = 0

    def __post_init__(self):
        super().__post_init__()
        self.check("interval", self.interval, 1)
        self.check("window", self.window, 0)
        self._past: list[np.ndarray] = []
        self._sum: np.ndarray | None = None
        self._placed: tuple[np.ndarray, np.ndarray] | None = None
        self._iteration = 0

    def plan(self, batch: Batch) -> Outcome:
        layers = batch.num_layers
        weights, tables = [], []
        for start in range(0, batch.num_plans, layers):
            weight, table = self._placement(batch)
            weights.append(weight)
            tables.append(table)
            self._remember(batch.totals[start : start + layers])
        weight, table = np.concatenate(weights), np.concatenate(tables)
        return split_static(batch, weight, table, self._split)

    def _split(self, batch, plan, expert, weight):
        return even_split(batch.totals[plan, expert], weight)

    def _placement(self, batch):
        """`[L, E, P]` replicas by rank, and the physical table `[L, P, C]`."""
        if self._iteration == 0:
            return home_placement(batch, self.slots)
        if self._placed is None or (self._iteration - 1) % self.interval == 0:
            self._placed = place_static(self._sum, batch.num_ranks, self.slots)
        return self._placed

    def _remember(self, totals):
        totals = totals.astype(np.int64)
        self._sum = totals if self._sum is None else self._sum + totals
        if self.window:
            self._past.append(totals)
            if len(self._past) > self.window:
                self._sum = self._sum - self._past.pop(0)
        self._iteration += 1


@dataclasses.dataclass
class StaticWhole(Policy):
    """EPLB from the whole trace's loads: the best that a standing plan could know."""

    name = "eplb-whole"
    needs_totals = True

    def fit(self, totals) -> None:
        self._totals = totals
        self._placed: Any = None  # made at the first plan

    def plan(self, batch: Batch) -> Outcome:
        if self._placed is None:
            self._placed = place_static(self._totals, batch.num_ranks, self.slots)
        repeat = batch.num_plans // batch.num_layers
        weight, table = (np.tile(a, (repeat, 1, 1)) for a in self._placed)
        return split_static(batch, weight, table, self._split)

    def _split(self, batch, plan, expert, weight):
        return even_split(batch.totals[plan, expert], weight)


@dataclasses.dataclass
class Resplit(StaticWhole):
    """LPLB-style: whole-trace EPLB replicas, each call's routes re-split over them.

    The split minimises the highest load. It is found by pouring each expert's routes again over its
    replicas with the others held, `sweeps` times: the sum of squares falls with every step, and its
    minimum is the linear program's optimum.
    """

    name = "lplb"

    sweeps: int = 8

    def __post_init__(self):
        super().__post_init__()
        self.check("sweeps", self.sweeps, 0, 1000)

    def _split(self, batch, plan, expert, weight):
        return resplit(batch, plan, expert, weight, self.sweeps)


def home_placement(batch: Batch, num_slots: int):
    """`[L, E, P]` and `[L, P, C]` of no replicas: every expert at home, spare slots empty."""
    ranks = np.arange(batch.num_experts) // batch.home
    weight = np.zeros((batch.num_layers, batch.num_experts, batch.num_ranks), np.int8)
    weight[:, np.arange(batch.num_experts), ranks] = 1
    table = np.full((batch.num_layers, batch.num_ranks, batch.home + num_slots), -1, np.int32)
    table[:, :, : batch.home] = np.arange(batch.num_experts).reshape(batch.num_ranks, -1)
    return weight, table


def place_static(totals, num_ranks: int, num_slots: int):
    """EPLB on one node: replicas by rank `[L, E, P] i8` and the physical table `[L, P, C] i32`."""
    layers, experts = totals.shape
    slots = experts + num_ranks * num_slots
    phy2log, _, _ = rebalance_experts(totals, slots, 1, 1, num_ranks)
    table = phy2log.reshape(layers, num_ranks, -1)
    weight = np.zeros((layers, experts, num_ranks), np.int8)
    index = (np.arange(layers)[:, None, None], table, np.arange(num_ranks)[None, :, None])
    np.add.at(weight, index, 1)
    return weight, table.astype(np.int32)


def split_static(batch: Batch, weight, table, split) -> Outcome:
    """Rows for the experts that do not simply run at home, and the loads they give."""
    at_home = np.zeros(weight.shape[1:], bool)
    at_home[np.arange(batch.num_experts), np.arange(batch.num_experts) // batch.home] = True
    plan, expert = np.nonzero(((weight > 0) != at_home).any(axis=2))
    quota = split(batch, plan, expert, weight[plan, expert]).astype(np.int32)
    load = batch.load_before.astype(np.int64)
    totals = batch.totals[plan, expert]
    size = batch.num_plans * batch.num_ranks
    left = np.bincount(plan * batch.num_ranks + expert // batch.home, totals, size)
    load -= left.reshape(load.shape).astype(np.int64)
    starts = np.flatnonzero(np.diff(plan, prepend=-1))
    if len(starts):
        load[plan[starts]] += np.add.reduceat(quota, starts, axis=0)
    return no_copies(batch, plan, expert, quota, load.astype(np.int32), table)


def resplit(batch: Batch, plan, expert, weight, sweeps: int):
    """`[M, P]` quotas that level the loads, given which ranks hold each row's expert."""
    total = batch.totals[plan, expert].astype(np.int64)
    quota = even_split(total, weight)
    load = np.zeros((batch.num_plans, batch.num_ranks), np.int64)
    np.add.at(load, plan, quota)
    moved = np.zeros((batch.num_plans, batch.num_experts), bool)
    moved[plan, expert] = True
    home = np.where(moved, 0, batch.totals).reshape(batch.num_plans, batch.num_ranks, -1)
    load += home.sum(axis=2)
    free = np.flatnonzero((weight > 0).sum(axis=1) > 1)
    # The heaviest first, one expert of every plan at a time.
    order = free[np.lexsort((-total[free], plan[free]))]
    ordinal = np.arange(len(order)) - np.searchsorted(plan[order], plan[order])
    steps = [order[ordinal == i] for i in range(ordinal.max(initial=-1) + 1)]
    for _ in range(sweeps):
        for row in steps:
            n = plan[row]
            others = load[n] - quota[row]
            quota[row] = water_fill(others, total[row], weight[row] > 0)
            load[n] = others + quota[row]
    return quota
