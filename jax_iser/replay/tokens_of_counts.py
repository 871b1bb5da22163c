"""Tokens whose routes have given counts: how a made-up trace is written to a file."""

from __future__ import annotations

import numpy as np

from jax_iser.replay.trace import Trace
from jax_iser.replay.traces.npz import write_npz


def tokens_of_counts(counts: np.ndarray, top_k: int, rng) -> np.ndarray:
    """`[tokens, top_k] u16`: distinct experts a token, each expert as often as `counts [E]` says.

    Routes are laid out expert by expert and dealt to the tokens in turn; as no expert has more
    routes than there are tokens, none meets a token twice. Then tokens and order are shuffled.

    Raises:
      ValueError: where the counts do not fill whole tokens, or an expert has too many of them.

    Example:
      >>> ids = tokens_of_counts(np.array([2, 1, 1]), 2, np.random.default_rng(0))
      >>> np.bincount(ids.ravel()).tolist()
      [2, 1, 1]
    """
    tokens, rest = divmod(int(counts.sum()), top_k)
    if rest or counts.max(initial=0) > tokens:
        raise ValueError(
            f"counts of {int(counts.sum())} routes, at most {int(counts.max(initial=0))} for an "
            f"expert, are not those of {tokens} tokens with {top_k} distinct experts each"
        )
    ids = np.repeat(np.arange(len(counts), dtype=np.uint16), counts)
    ids = ids.reshape(top_k, tokens).T[rng.permutation(tokens)]
    return rng.permuted(ids, axis=1)


def write_counts(path, trace: Trace, num_ranks: int, tokens_per_rank: int) -> int:
    """Writes a made-up trace's iterations as tokens; returns how many.

    Layers are drawn on their own: what a token does in one says nothing of the next.
    """
    rng = np.random.default_rng((getattr(trace, "seed", 0), 2))
    ids, lengths, source = [], [], []
    for counts in trace.cut(num_ranks, tokens_per_rank).counts:
        for rank in range(num_ranks):
            layers = [tokens_of_counts(layer[rank], trace.top_k, rng) for layer in counts]
            ids.append(np.stack(layers, axis=1))
            lengths.append(len(ids[-1]))
            source.append(np.full(lengths[-1], rank))
    write_npz(path, np.concatenate(ids), lengths, trace.num_experts, np.concatenate(source))
    return sum(lengths)
