"""Traces of counts: routes by expert for each recorded step, by source rank where it is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from jax_iser.replay.trace import Cut
from jax_iser.replay.traces.errors import TraceError


class CountTrace:
    """A recorded trace of counts; each recorded step is one iteration.

    Args:
      path: where it was read from, for messages.
      name: for tables.
      num_steps, num_layers, num_experts: sizes.
      steps: yields `[R, L, E]` integers for each step, in order; R recorded ranks, 1 where the
        counts are those of all ranks together.
      num_sources: `R`.
      top_k: experts of a token, 0 where the trace does not say.
      notes: what was assumed in reading it.
    """

    def __init__(
        self,
        path,
        name: str,
        num_steps: int,
        num_layers: int,
        num_experts: int,
        steps: Callable[[], Iterator[np.ndarray]],
        num_sources: int = 1,
        top_k: int = 0,
        notes: tuple[str, ...] = (),
    ):
        self.path, self.name, self.notes = path, name, notes
        self.num_steps, self.num_layers, self.num_experts = num_steps, num_layers, num_experts
        self.top_k, self._steps, self.num_sources = top_k, steps, num_sources

    def cut(self, num_ranks: int, tokens_per_rank: int) -> Cut:
        """One iteration for each recorded step; `tokens_per_rank` is what was recorded.

        Counts of as many recorded ranks as `num_ranks`, or of a multiple of it, keep their
        sources; other counts are spread evenly over the ranks.
        """
        notes = [f"counts only: each of the {self.num_steps} recorded steps is one iteration"]
        if self.num_sources > 1 and self.num_sources % num_ranks == 0:
            split = self._merge
        else:
            split = _spread
            notes.append(f"sources spread evenly over {num_ranks} ranks")
        return Cut(self.num_steps, 0, tuple(notes), self._counts(num_ranks, split))

    def _merge(self, step, num_ranks):
        return step.reshape(num_ranks, -1, *step.shape[1:]).sum(axis=1)

    def _counts(self, num_ranks, split) -> Iterator[np.ndarray]:
        for index, step in enumerate(self._steps()):
            where = f"counts of step {index}"
            if step.size and step.min() < 0:
                raise TraceError(self.path, where, int(step.min()), "counts of at least 0")
            total = step.sum(axis=(0, 2), dtype=np.float64).max(initial=0)
            if total >= 2**31:
                found = f"{total:.0f} routes in a layer"
                raise TraceError(self.path, where, found, f"at most {2**31 - 1}")
            counts = split(step.astype(np.int64), num_ranks)
            yield np.ascontiguousarray(counts.transpose(1, 0, 2), np.int32)


def _spread(step, num_ranks):
    """`[P, L, E]`: the same from every rank, remainders dealt round the ranks expert by expert."""
    total = step.sum(axis=0)
    rest = total % num_ranks
    # An expert's extra routes start where those of the expert before it ended.
    first = np.cumsum(rest, axis=1) - rest
    ranks = np.arange(num_ranks)[:, None, None]
    extra = (ranks - first) % num_ranks < rest
    return total // num_ranks + extra
