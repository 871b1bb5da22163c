"""The all-rank policy: the hottest experts of the layer on every rank (paper section 6.1)."""

from __future__ import annotations

import dataclasses

import numpy as np

from jax_iser.replay.batch import Batch, Outcome
from jax_iser.replay.policies.base import Policy
from jax_iser.replay.split import water_fill


@dataclasses.dataclass
class AllRank(Policy):
    """Broadcasts the `slots` hottest experts to all ranks and levels the loads with their routes.

    The hottest are those with most routes of this call, ties to the lower id. All their routes form
    one pool that is poured over the ranks, coldest first; the ranks then take shares of the experts
    in rank order, which is one of many splits with the same loads.

    `choose="rank"` takes instead, `slots` times, the heaviest expert left at home on the rank with
    the highest load left.
    """

    name = "all-rank"

    choose: str = "layer"

    def __post_init__(self):
        super().__post_init__()
        if self.choose not in ("layer", "rank"):
            raise ValueError(f"choose={self.choose!r} is not one of layer, rank")

    def plan(self, batch: Batch) -> Outcome:
        chosen = self._chosen(batch)
        hot = np.take_along_axis(batch.totals, chosen, axis=1).astype(np.int64)
        base = batch.load_before.astype(np.int64)
        plans = np.arange(batch.num_plans)
        np.subtract.at(base, (plans[:, None], chosen // batch.home), hot)
        share = water_fill(base, hot.sum(axis=1), np.ones(base.shape, bool))
        # Ranks' shares and experts' routes are laid out on one line, where they overlap.
        ends, stops = np.cumsum(share, axis=1)[:, None, :], np.cumsum(hot, axis=1)[:, :, None]
        opens, starts = ends - share[:, None], stops - hot[:, :, None]
        overlap = np.minimum(ends, stops) - np.maximum(opens, starts)
        quota = np.maximum(overlap, 0).reshape(-1, batch.num_ranks).astype(np.int32)
        count = chosen.shape[1]
        owners = np.zeros((batch.num_plans, batch.num_ranks), np.int32)
        np.add.at(owners, (plans[:, None], chosen // batch.home), 1)
        every = np.full(batch.num_plans, count)
        table = np.repeat(chosen[:, None, :], batch.num_ranks, axis=1).astype(np.int32)
        return Outcome(
            plan=np.repeat(plans, count),
            expert=chosen.reshape(-1),
            quota=quota,
            load=(base + share).astype(np.int32),
            slots=table,
            owner_copies=owners,
            remote_copies=every * (batch.num_ranks - 1),
            broadcasts=every,
            without_owner=np.zeros_like(every),
        )

    def _chosen(self, batch):
        """`[N, S]` experts, in the order in which they are chosen."""
        if self.choose == "layer":
            return np.argsort(-batch.totals, axis=1, kind="stable")[:, : self.slots]
        left = batch.totals.astype(np.int64)
        plans = np.arange(batch.num_plans)
        chosen = np.empty((batch.num_plans, min(self.slots, batch.num_experts)), np.int64)
        for step in range(chosen.shape[1]):
            at_home = left.reshape(batch.num_plans, batch.num_ranks, -1)
            load = np.where((at_home >= 0).any(axis=2), np.maximum(at_home, 0).sum(axis=2), -1)
            rank = load.argmax(axis=1)
            mine = np.arange(batch.num_experts) // batch.home == rank[:, None]
            chosen[:, step] = np.where(mine, left, -2).argmax(axis=1)
            left[plans, chosen[:, step]] = -1  # chosen
        return chosen
