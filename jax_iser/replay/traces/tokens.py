"""Traces of tokens: which rank each token comes from, and equal chunks of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np

from jax_iser.replay.trace import Cut
from jax_iser.replay.traces.errors import TraceError

_ROUTES_PER_BLOCK = 2**21


class TokenTrace:
    """A recorded trace of token routes, read in blocks at every pass.

    Args:
      path: where it was read from, for messages.
      name: for tables.
      num_tokens, num_layers, top_k, num_experts: sizes.
      blocks: yields `[tokens, L, K]` integers of about the given number of tokens, in order.
      request_lengths: `[requests]` integers that sum to `num_tokens`, or None: one request.
      source_rank: `[tokens]` integers or None, the rank that recorded each token.
      notes: what was assumed in reading it.
    """

    def __init__(
        self,
        path,
        name: str,
        num_tokens: int,
        num_layers: int,
        top_k: int,
        num_experts: int,
        blocks: Callable[[int], Iterator[np.ndarray]],
        request_lengths=None,
        source_rank=None,
        notes: tuple[str, ...] = (),
    ):
        self.path, self.name, self.notes = path, name, notes
        self.num_tokens, self.num_layers, self.top_k = num_tokens, num_layers, top_k
        self.num_experts, self._blocks = num_experts, blocks
        self.request_lengths = _checked_lengths(path, request_lengths, num_tokens)
        self.source_rank = source_rank

    def cut(self, num_ranks: int, tokens_per_rank: int) -> Cut:
        """Requests go round robin to the ranks; then equal chunks of `tokens_per_rank` tokens.

        Where the ranks that recorded the tokens are known and their number is `num_ranks`, or a
        multiple of it, those are used instead. A trace that cannot fill one chunk gives one
        iteration of the largest chunk that it can.
        """
        rank, notes = self._ranks(num_ranks)
        notes += self._repeats
        have = np.bincount(rank, minlength=num_ranks)
        chunk = min(tokens_per_rank, int(have.min()))
        if chunk < tokens_per_rank:
            notes.append(
                f"{self.num_tokens} tokens cannot fill one chunk of {tokens_per_rank} tokens/rank "
                f"at EP{num_ranks}: replayed at {chunk}"
            )
        iterations = int(have.min()) // chunk if chunk else 0
        counts = self._counts(rank, num_ranks, chunk, iterations)
        return Cut(iterations, chunk, tuple(notes), counts)

    @functools.cached_property
    def _repeats(self) -> tuple[str, ...]:
        """A note where tokens at the start of the trace name an expert twice in a layer."""
        block = next(self._blocks(self._tokens_per_block), np.empty((0, 1, 1), np.int8))
        ids = np.sort(block, axis=-1)
        same = (ids[..., 1:] == ids[..., :-1]) & (ids[..., 1:] >= 0)
        count = int(same.any(axis=(1, 2)).sum())
        note = (
            f"{count} of the first {len(block)} tokens name an expert twice in a layer: "
            "counted as two routes, as moe_layer computes them; padding is -1"
        )
        return (note,) if count else ()

    @property
    def _tokens_per_block(self):
        return max(1, _ROUTES_PER_BLOCK // (self.num_layers * self.top_k))

    def _ranks(self, num_ranks):
        """`[tokens]` ranks, and notes on how they were found."""
        if self.source_rank is not None:
            recorded = int(self.source_rank.max(initial=0)) + 1
            if recorded % num_ranks == 0:
                return self.source_rank.astype(np.int32) // (recorded // num_ranks), []
            return self._dealt(num_ranks, [f"the {recorded} recorded ranks are not {num_ranks}"])
        return self._dealt(num_ranks, [])

    def _dealt(self, num_ranks, notes):
        requests = len(self.request_lengths)
        if requests < num_ranks:
            notes.append(
                f"{requests} requests cannot go round {num_ranks} ranks: each rank gets an equal "
                "run of tokens"
            )
            # Each rank's run has the same length; what is left over at the end is not used.
            each = max(self.num_tokens // num_ranks, 1)
            run = np.arange(self.num_tokens, dtype=np.int32) // each
            return np.minimum(run, num_ranks - 1), notes
        turn = np.arange(requests, dtype=np.int32) % num_ranks
        return np.repeat(turn, self.request_lengths), notes

    def _counts(self, rank, num_ranks, chunk, iterations) -> Iterator[np.ndarray]:
        """Counts of each iteration as soon as its last token has been read."""
        if not iterations:
            return
        order = np.argsort(rank, kind="stable")
        starts = np.concatenate([[0], np.cumsum(np.bincount(rank, minlength=num_ranks))[:-1]])
        place = np.empty_like(rank)
        place[order] = np.arange(len(rank)) - starts[rank[order]]
        del order
        iteration = np.where(place < chunk * iterations, place // chunk, -1)
        last_token = np.zeros(iterations, np.int64)
        np.maximum.at(last_token, iteration[iteration >= 0], np.flatnonzero(iteration >= 0))
        # Iterations overlap in the file, because ranks advance at different speeds.
        open_counts: dict[int, np.ndarray] = {}
        ready = done = 0
        for block in self._blocks(self._tokens_per_block):
            span = slice(done, done + len(block))
            self._add(open_counts, block, iteration[span], rank[span], num_ranks)
            done += len(block)
            while ready < iterations and last_token[ready] < done:
                yield open_counts.pop(ready)
                ready += 1

    def _add(self, open_counts, block, iteration, rank, num_ranks):
        ids = block.astype(np.int64)
        valid = (ids >= 0) & (ids < self.num_experts)
        shape = (self.num_layers, num_ranks, self.num_experts)
        layer = np.arange(self.num_layers)[None, :, None]
        for i in np.unique(iteration[iteration >= 0]):
            mine = iteration == i
            flat = (layer * num_ranks + rank[mine][:, None, None]) * self.num_experts + ids[mine]
            counts = np.bincount(flat[valid[mine]], minlength=int(np.prod(shape)))
            counts = counts.reshape(shape).astype(np.int32)
            if int(i) in open_counts:
                open_counts[int(i)] += counts
            else:
                open_counts[int(i)] = counts


def _checked_lengths(path, lengths, num_tokens):
    if lengths is None:
        return np.array([num_tokens])
    lengths = np.asarray(lengths)
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu":
        found = f"{lengths.dtype} of shape {lengths.shape}"
        raise TraceError(path, "request_lengths", found, "integers [requests]")
    if lengths.size and lengths.min() < 0:
        raise TraceError(path, "request_lengths", int(lengths.min()), "lengths of at least 0")
    if int(lengths.sum(dtype=np.float64)) != num_tokens:
        total = int(lengths.sum(dtype=np.float64))
        raise TraceError(path, "request_lengths", f"a sum of {total}", f"the {num_tokens} tokens")
    return lengths.astype(np.int64)
