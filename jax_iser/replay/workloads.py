"""Eight kinds of routing, W0 to W7, that tests and replays share (after Megatron-LM PR 7488).

Every one is a function of (workload, seed, step) alone. The routes themselves are the oracle:
counts and loads follow from them exactly.
"""

from __future__ import annotations

import numpy as np

WORKLOADS = {
    "W0": "balanced: every expert gets the same number of routes, to within one",
    "W1": "a hot set: an eighth of the experts, anywhere, draws most routes",
    "W2": "a hot rank: the experts of one rank draw most routes",
    "W3": "spread hot: one hot expert on every rank, hotter on higher ranks",
    "W4": "ragged sources: ranks bring from none to all of their tokens",
    "W5": "one expert and all experts of one rank draw nothing",
    "W6": "a hotspot that moves on to the next rank at every step",
    "W7": "a burst: balanced but for every fourth step, when one expert draws nearly everything",
}


def topk_ids(
    workload: str,
    *,
    num_ranks: int,
    tokens_per_rank: int,
    num_experts: int,
    top_k: int,
    seed: int = 0,
    step: int = 0,
) -> np.ndarray:
    """One step of a workload.

    Args:
      workload: a key of `WORKLOADS`.
      num_ranks: ranks `P`, which divides `num_experts`.
      tokens_per_rank, num_experts, top_k: sizes; `top_k` is at most `num_experts`.
      seed, step: equal ones give equal routes.

    Returns:
      `[P, tokens, top_k] i32`: distinct experts for each token; tokens that a rank does not bring
      are -1.

    Raises:
      ValueError: on an unknown workload.

    Example:
      >>> ids = topk_ids("W0", num_ranks=2, tokens_per_rank=4, num_experts=8, top_k=2)
      >>> np.bincount(ids.ravel()).tolist()
      [2, 2, 2, 2, 2, 2, 2, 2]
    """
    weights = popularity(
        workload, num_ranks=num_ranks, num_experts=num_experts, seed=seed, step=step
    )
    rng = np.random.default_rng((seed, step, int(workload[1:])))
    shape = (num_ranks, tokens_per_rank)
    if (weights == weights[0]).all():
        return _balanced(shape, num_experts, top_k, rng)
    ids = _draw(weights, shape, top_k, rng)
    if workload == "W4":
        brought = tokens_brought(workload, num_ranks, tokens_per_rank, rng)
        ids[np.arange(tokens_per_rank) >= brought[:, None]] = -1
    return ids


def popularity(
    workload: str, *, num_ranks: int, num_experts: int, seed: int = 0, step: int = 0
) -> np.ndarray:
    """`[E] f64`: what each expert draws of a step, up to a factor.

    Hot experts stay hot from step to step: which they are depends on the seed alone.
    """
    if workload not in WORKLOADS:
        raise ValueError(f"workload={workload!r} is not one of {', '.join(WORKLOADS)}")
    if workload == "W0" or (workload == "W7" and step % 4 != 1):
        return np.ones(num_experts)
    number = int(workload[1:])
    rng = np.random.default_rng((seed, number))
    return _popularity(number, num_ranks, num_experts, rng, step)


def tokens_brought(workload: str, num_ranks: int, tokens_per_rank: int, rng) -> np.ndarray:
    """`[P] i64`: tokens of each rank in a step; less than all of them only in W4."""
    if workload != "W4":
        return np.full(num_ranks, tokens_per_rank)
    return rng.permutation(np.linspace(0, tokens_per_rank, num_ranks).astype(np.int64))


def counts(topk_ids: np.ndarray, num_experts: int) -> np.ndarray:
    """`[P, E] i32`: routes of `[P, tokens, top_k]` by source rank and expert, padding left out."""
    ranks = len(topk_ids)
    source = np.repeat(np.arange(ranks), topk_ids[0].size)
    ids = topk_ids.reshape(-1)
    valid = (ids >= 0) & (ids < num_experts)
    flat = source[valid] * num_experts + ids[valid]
    return np.bincount(flat, minlength=ranks * num_experts).reshape(ranks, -1).astype(np.int32)


def _balanced(shape, num_experts, top_k, rng):
    """Round robin over the experts, in an order of the step's own."""
    routes = np.arange(shape[0] * shape[1] * top_k) % num_experts
    return rng.permutation(num_experts)[routes].reshape(*shape, top_k).astype(np.int32)


def _popularity(number, num_ranks, num_experts, rng, step):
    """`[E] f64`, what share of the routes each expert draws."""
    home = num_experts // num_ranks
    weights = np.ones(num_experts)
    owner = np.arange(num_experts) // home
    hot_rank = (int(rng.integers(num_ranks)) + (step if number == 6 else 0)) % num_ranks
    if number == 1:
        hot = rng.permutation(num_experts)[: max(1, num_experts // 8)]
        weights[hot] = 6 * num_experts / len(hot)
    elif number in (2, 6):
        weights[owner == hot_rank] = 3 * num_ranks
    elif number == 3:
        hot = np.arange(num_ranks) * home + rng.integers(home, size=num_ranks)
        weights[hot] = 2 * home * (1 + np.arange(num_ranks) / num_ranks)
    elif number == 4:
        weights = rng.exponential(size=num_experts) + 0.01
    elif number == 5 and num_ranks > 1:
        weights[rng.integers(num_experts)] = 0
        weights[owner == hot_rank] = 0
    elif number == 7:
        weights[rng.integers(num_experts)] = 20 * num_experts
    return weights


def _draw(weights, shape, top_k, rng):
    """`top_k` distinct experts a token, drawn by weight without replacement (Gumbel top-k)."""
    with np.errstate(divide="ignore"):
        scores = np.log(weights) + rng.gumbel(size=(*shape, len(weights)))
    scores[..., weights == 0] = -1e9 + rng.random((*shape, int((weights == 0).sum())))
    best = np.argpartition(-scores, top_k - 1, axis=-1)[..., :top_k]
    return np.sort(best, axis=-1).astype(np.int32)
