"""Workloads W0 to W7 as a trace of counts, for any sizes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jax_iser.replay.synthetic import round_to_sum
from jax_iser.replay.trace import Cut
from jax_iser.replay.workloads import WORKLOADS, popularity, tokens_brought


class WorkloadTrace:
    """Counts of a workload, each a function of (workload, seed, step, layer).

    An expert's routes from a rank are its share of the rank's routes, rounded so that they sum to
    them: what `workloads.topk_ids` draws token by token, without the noise of the draw. Layers
    are seeds of their own.
    """

    def __init__(
        self,
        name: str,
        *,
        num_layers: int = 61,
        num_experts: int = 384,
        top_k: int = 6,
        num_iterations: int = 20,
        seed: int = 0,
    ):
        if name not in WORKLOADS:
            raise ValueError(f"workload {name!r} is not one of {', '.join(WORKLOADS)}")
        self.workload, self.name = name, f"workload:{name}"
        self.notes: tuple[str, ...] = ()
        self.num_layers, self.num_experts, self.top_k = num_layers, num_experts, top_k
        self.num_iterations, self.seed = num_iterations, seed

    def cut(self, num_ranks: int, tokens_per_rank: int) -> Cut:
        """One iteration a step."""
        counts = self._counts(num_ranks, tokens_per_rank)
        return Cut(self.num_iterations, tokens_per_rank, (), counts)

    def step(self, step: int, num_ranks: int, tokens_per_rank: int) -> np.ndarray:
        """`[L, P, E] i32`, the counts of one step; a rank's routes are its tokens times `top_k`."""
        rng = np.random.default_rng((self.seed, int(self.workload[1:]), step))
        sizes = {"num_ranks": num_ranks, "num_experts": self.num_experts, "step": step}
        seeds = range(self.seed * self.num_layers, (self.seed + 1) * self.num_layers)
        share = np.stack([popularity(self.workload, seed=seed, **sizes) for seed in seeds])
        tokens = tokens_brought(self.workload, num_ranks, tokens_per_rank, rng)
        rows = [round_to_sum(share, int(n), self.top_k, rng) for n in tokens]
        return np.stack(rows, axis=1)

    def _counts(self, num_ranks, tokens_per_rank) -> Iterator[np.ndarray]:
        for step in range(self.num_iterations):
            yield self.step(step, num_ranks, tokens_per_rank)
