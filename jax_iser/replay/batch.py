"""What a policy is given and what it answers: count matrices in, split routes out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np


class Batch:
    """Some consecutive iterations of some layers; plan `n` is iteration `n // L`, layer `n % L`.

    Args:
      iterations: `[L, P, E]` i32 arrays, C-contiguous, at least one.
      first_layer: index of the first layer in the trace.
    """

    def __init__(self, iterations: Sequence[np.ndarray], first_layer: int = 0):
        self.iterations, self.first_layer = list(iterations), first_layer
        self.num_layers, self.num_ranks, self.num_experts = self.iterations[0].shape

    @property
    def num_plans(self) -> int:
        """`N`, a multiple of `num_layers`."""
        return len(self.iterations) * self.num_layers

    @cached_property
    def counts(self) -> np.ndarray:
        """`[N, P, E] i32`, routes by source rank and expert, one plan per leading index."""
        return np.concatenate(self.iterations)

    @property
    def home(self) -> int:
        """Home experts of a rank; rank r owns experts `[r*home, (r+1)*home)`."""
        return self.num_experts // self.num_ranks

    @cached_property
    def totals(self) -> np.ndarray:
        """`[N, E] i32`, routes of each expert from all ranks."""
        return self.counts.sum(axis=1, dtype=np.int32)

    @cached_property
    def load_before(self) -> np.ndarray:
        """`[N, P] i32`, routes that each rank computes when every expert runs at home."""
        return self.totals.reshape(self.num_plans, self.num_ranks, self.home).sum(
            axis=2, dtype=np.int32
        )

    @cached_property
    def sent(self) -> np.ndarray:
        """`[N, P] i32`, routes that leave the router of each rank."""
        return self.counts.sum(axis=2, dtype=np.int32)

    @cached_property
    def local_before(self) -> np.ndarray:
        """`[N, P] i32`, routes of each rank to its own home experts."""
        local = np.empty((self.num_plans, self.num_ranks), np.int32)
        for r in range(self.num_ranks):
            own = self.counts[:, r, r * self.home : (r + 1) * self.home]
            np.sum(own, axis=1, dtype=np.int32, out=local[:, r])
        return local

    @property
    def target(self) -> np.ndarray:
        """`[N] i32`, the water level: the mean load, rounded up."""
        return -(-self.load_before.sum(axis=1, dtype=np.int64) // self.num_ranks)


class Outcome(NamedTuple):
    """Where a policy's routes run. An expert without a row runs at home.

    Attributes:
      plan: `[M] i32`, the plan that each row belongs to, ascending.
      expert: `[M] i32`, the expert whose routes the row splits; a plan has at most one row for it.
      quota: `[M, P] i32`, routes of the expert computed on each rank. Within it a route stays on
        its source rank where that rank has quota; the surplus of all ranks fills what is left in
        rank order.
      load: `[N, P] i32`, routes that each rank computes.
      slots: `[N, P, C] i32`, experts held beside the home experts, -1 for none; C columns hold at
        most the policy's slots.
      owner_copies: `[N, P] i32`, expert payloads that leave each rank in the layer.
      remote_copies: `[N] i32`, experts received by ranks that do not own them, in the layer.
      broadcasts: `[N] i32`, multicasts (for point to point: copies) in the layer.
      without_owner: `[N] i32`, those of them whose group excludes the owner.
    """

    plan: np.ndarray
    expert: np.ndarray
    quota: np.ndarray
    load: np.ndarray
    slots: np.ndarray
    owner_copies: np.ndarray
    remote_copies: np.ndarray
    broadcasts: np.ndarray
    without_owner: np.ndarray


def no_copies(batch: Batch, plan, expert, quota, load, slots=None) -> Outcome:
    """An `Outcome` of a policy that copies nothing within the layer."""
    if slots is None:
        slots = np.empty((batch.num_plans, batch.num_ranks, 0), np.int32)
    zeros = np.zeros(batch.num_plans, np.int32)
    owner_copies = np.zeros((batch.num_plans, batch.num_ranks), np.int32)
    return Outcome(plan, expert, quota, load, slots, owner_copies, zeros, zeros, zeros)


def loads_of(batch: Batch, plan, expert, quota) -> np.ndarray:
    """`[N, P] i32`: loads before, with the rows' experts taken from home and put on their quota."""
    load = batch.load_before.astype(np.int64)
    np.subtract.at(load, (plan, expert // batch.home), quota.sum(axis=1))
    np.add.at(load, plan, quota)
    return load.astype(np.int32)


def why_wrong(batch: Batch, outcome, slots: int) -> str | None:
    """Why an answer is no `Outcome` of the batch with so many slots a rank, or None."""
    if not isinstance(outcome, Outcome):
        return f"{type(outcome).__name__}, expected a jax_iser.replay.batch.Outcome"
    n, p, m = batch.num_plans, batch.num_ranks, len(outcome.plan)
    shapes = {"plan": (m,), "expert": (m,), "quota": (m, p), "slots": (n, p, ...)}
    shapes |= dict.fromkeys(("load", "owner_copies"), (n, p))
    for name, value in outcome._asdict().items():
        shape, wanted = np.shape(value), shapes.get(name, (n,))
        fits = len(shape) == len(wanted) and all(
            b in (a, ...) for a, b in zip(shape, wanted, strict=True)
        )
        if not fits or np.asarray(value).dtype.kind not in "iu":
            found = f"{np.asarray(value).dtype} of shape {shape}"
            return f"{name}: {found}, expected integers {wanted}".replace("Ellipsis", "C")
    if outcome.slots.shape[2] > slots:
        return f"slots: {outcome.slots.shape[2]} experts a rank, above slots={slots}"
    for name, size in (("plan", n), ("expert", batch.num_experts)):
        index = getattr(outcome, name)
        if m and not 0 <= index.min() <= index.max() < size:
            return f"{name}: {index.min()} to {index.max()}, expected 0 to {size - 1}"
    if (np.diff(outcome.plan) < 0).any():
        return "plan: not in ascending order"
    if len(np.unique(outcome.plan.astype(np.int64) * batch.num_experts + outcome.expert)) < m:
        return "two rows of one plan for the same expert"
    if (outcome.quota < 0).any() or (
        outcome.quota.sum(axis=1) != batch.totals[outcome.plan, outcome.expert]
    ).any():
        return "quota: rows that do not sum to the routes of their experts"
    if (outcome.load != loads_of(batch, outcome.plan, outcome.expert, outcome.quota)).any():
        return "load: not that of its quota; jax_iser.replay.batch.loads_of computes it"
    return None


def local_routes(batch: Batch, outcome: Outcome) -> np.ndarray:
    """`[N, P] i32`: routes that need not leave their source rank under the outcome."""
    local = batch.local_before.copy()
    if not len(outcome.plan):
        return local
    own = batch.counts[outcome.plan, :, outcome.expert]
    kept = np.minimum(own, outcome.quota)
    owner = outcome.expert // batch.home
    rows = np.arange(len(owner))
    kept[rows, owner] -= own[rows, owner]
    # Rows of a plan are consecutive, so that one segmented sum adds them up.
    starts = np.flatnonzero(np.diff(outcome.plan, prepend=-1))
    local[outcome.plan[starts]] += np.add.reduceat(kept, starts, axis=0)
    return local
