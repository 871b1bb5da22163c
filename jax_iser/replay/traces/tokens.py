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
        self.path, self.name = path, name
        self.num_tokens, self.top_k = num_tokens, top_k
        self.num_experts, self._all_layers, self._recorded = num_experts, blocks, num_layers
        self.request_lengths = _checked_lengths(path, request_lengths, num_tokens)
        self.source_rank = source_rank
        self._layers = np.flatnonzero(self._layers_with_routes())
        self.num_layers = len(self._layers)
        self.notes = notes + layers_left_out(num_layers - self.num_layers)

    def cut(self, num_ranks: int, tokens_per_rank: int) -> Cut:
        """Requests go round robin to the ranks; then equal chunks of `tokens_per_rank` tokens.

        Where the ranks that recorded the tokens are known and their number is `num_ranks`, or a
        multiple of it, those are used instead. Where fewer requests than ranks hold tokens, or
        where the dealt requests would leave more than half of the tokens unused, every rank gets
        an equal run of tokens. A trace that cannot fill one chunk gives one iteration of the
        largest chunk that it can.
        """
        rank, notes = self._ranks(num_ranks, tokens_per_rank)
        notes += self._repeats
        fewest = int(np.bincount(rank, minlength=num_ranks).min())
        chunk = min(tokens_per_rank, fewest)
        if chunk < tokens_per_rank:
            notes.append(
                f"the rank with the fewest tokens has {fewest}, which cannot fill one chunk of "
                f"{tokens_per_rank} tokens/rank at EP{num_ranks}: replayed at {chunk}"
            )
        iterations = fewest // chunk if chunk else 0
        if unused := self.num_tokens - iterations * chunk * num_ranks:
            notes.append(
                f"{unused} of {self.num_tokens} tokens are not replayed at EP{num_ranks}: every "
                f"rank is given {iterations} x {chunk}"
            )
        counts = self._counts(rank, num_ranks, chunk, iterations)
        return Cut(iterations, chunk, tuple(notes), counts)

    def _blocks(self, rows: int) -> Iterator[np.ndarray]:
        """Blocks of the layers that hold routes."""
        for block in self._all_layers(rows):
            yield block if self.num_layers == self._recorded else block[:, self._layers]

    def _layers_with_routes(self):
        """`[L] bool`, the layers in which some token names an expert.

        Recorders leave a dense layer's part of their buffer at its first value, -1 or 0. A token's
        experts are distinct, so a token with 0 in every place names none. Where a token has one
        expert only, zeros alone could be expert 0; they count if no layer holds anything else.
        """
        named, zeros = np.zeros((2, self._recorded), bool)
        for block in self._all_layers(self._tokens_per_block):
            left = np.flatnonzero(~named)
            ids = block[:, left]
            zero = (ids == 0).any(axis=2)
            padded = (ids < 0).any(axis=2)
            named[left] |= ((ids > 0).any(axis=2) | (zero & padded)).any(axis=0)
            zeros[left] |= zero.any(axis=0)
            if named.all():
                break
        if not named.any() and 1 in (self.top_k, self.num_experts):
            named = zeros
        if not named.any():
            found = "no route at all: every id is padding or 0"
            raise TraceError(self.path, "topk_ids", found, "ids of experts")
        return named

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
        return max(1, _ROUTES_PER_BLOCK // (self._recorded * self.top_k))

    def _ranks(self, num_ranks, chunk):
        """`[tokens]` ranks, and notes on how they were found."""
        if self.source_rank is None:
            return self._dealt(num_ranks, chunk, [])
        recorded = int(self.source_rank.max(initial=0)) + 1
        if recorded % num_ranks:
            notes = [f"the {recorded} recorded ranks are not {num_ranks} or a multiple of it"]
            return self._dealt(num_ranks, chunk, notes)
        rank = self.source_rank.astype(np.int32) // (recorded // num_ranks)
        have = np.bincount(rank, minlength=num_ranks)
        if have.min():
            return rank, []
        notes = [f"the recording has no token of rank {int(have.argmin())} of {num_ranks}"]
        return self._dealt(num_ranks, chunk, notes)

    def _dealt(self, num_ranks, chunk, notes):
        """Requests with tokens round robin, or equal runs where that would waste half of them."""
        lengths = self.request_lengths[self.request_lengths > 0]
        turn = np.arange(len(lengths), dtype=np.int32) % num_ranks
        fewest = int(np.bincount(turn, lengths, num_ranks).min())
        run = self.num_tokens // num_ranks
        if fewest and 2 * _in_chunks(fewest, chunk) >= _in_chunks(run, chunk):
            return np.repeat(turn, lengths), notes
        reason = (
            f"{len(lengths)} requests cannot go round {num_ranks} ranks"
            if len(lengths) < num_ranks
            else f"{len(lengths)} requests dealt to {num_ranks} ranks leave one of them with "
            f"{fewest} of {self.num_tokens} tokens"
        )
        notes.append(f"{reason}: each rank gets an equal run of tokens")
        ranks = np.arange(self.num_tokens, dtype=np.int32) // max(run, 1)
        return np.minimum(ranks, num_ranks - 1), notes

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


def _in_chunks(tokens: int, chunk: int) -> int:
    """How many of a rank's tokens are replayed: whole chunks, or all in one smaller chunk."""
    return tokens // chunk * chunk if tokens >= chunk else tokens


def layers_left_out(count: int) -> tuple[str, ...]:
    """The note on layers that hold no route, none for none."""
    note = f"{count} layers without a route left out (dense layers, or not recorded)"
    return (note,) if count else ()


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
