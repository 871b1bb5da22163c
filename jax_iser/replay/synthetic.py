"""Synthetic routing calibrated to published popularity shares (paper section 2; docs/replay.md).

A layer's popularity has the published shares of its hottest experts and a decaying tail; experts
are placed at random; each iteration and each rank drifts around it. Nothing else is in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from jax_iser.replay.trace import Cut

RANKS_OF_SHARES = (1, 2, 4, 8, 16)


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Parameters of a synthetic trace; docs/replay.md says what each was fitted to.

    Attributes:
      shares: mean share of a layer's routes of its 1, 2, 4, 8 and 16 hottest experts; empty for
        uniform popularity.
      tail: exponent of the tail, `p[j] = p[16] exp(-((j - 16) / s) ** tail)`; s makes the sum 1.
      layer_spread: spread over layers of the exponent that sharpens or flattens the popularity.
      neighbours: correlation of neighbouring experts' popularity; 0 places experts at random.
      iteration_drift: spread of the log popularity over iterations, the same on all ranks.
      rank_drift: spread of it over ranks and iterations, on top.
      persistence: correlation of either drift with that of the iteration before.
    """

    shares: tuple[float, ...] = ()
    tail: float = 1.0
    layer_spread: float = 0.0
    neighbours: float = 0.0
    iteration_drift: float = 0.0
    rank_drift: float = 0.0
    persistence: float = 0.0


_FITTED = {
    "tail": 0.2,
    "layer_spread": 0.12,
    "neighbours": 0.22,
    "iteration_drift": 0.27,
    "rank_drift": 0.6,
    "persistence": 0.6,
}
CALIBRATIONS = {
    "mixed": Calibration((0.0469, 0.0807, 0.1302, 0.1992, 0.2940), **_FITTED),
    "gsm8k": Calibration((0.0881, 0.1468, 0.2224, 0.3147, 0.4245), **_FITTED),
    "uniform": Calibration(),
}


def popularity(shares, tail: float, num_experts: int) -> np.ndarray:
    """`[E] f64`, descending, with the given cumulative shares at ranks 1, 2, 4, 8, 16 and sum 1."""
    if not shares:
        return np.full(num_experts, 1 / num_experts)
    head = _head(np.asarray(shares))
    place = np.arange(1, num_experts - len(head) + 1)
    rest, low, high = 1 - sum(head), 1e-6, 1e9
    if len(place) * head[-1] <= rest:
        least = len(head) + int(rest / head[-1]) + 1
        raise ValueError(
            f"num_experts={num_experts} is too few for this trace: its 16 hottest experts draw "
            f"{sum(head):.0%} of the routes as published, and the others, none hotter than the "
            f"16th, cannot draw the rest; use at least {least} experts, or synthetic:uniform or a "
            "workload, which take any number"
        )
    for _ in range(200):
        scale = np.sqrt(low * high)
        values = head[-1] * np.exp(-((place / scale) ** tail))
        low, high = (scale, high) if values.sum() < rest else (low, scale)
    values *= rest / values.sum()
    return np.concatenate([head, values])


def _head(shares):
    """16 shares: log-linear between the published steps, each step's sum exact."""
    edges = np.concatenate([[0], RANKS_OF_SHARES])
    sums, sizes = np.diff(shares, prepend=0), np.diff(edges)
    middle = np.sqrt((edges[:-1] + 1) * edges[1:])
    place = np.arange(1, RANKS_OF_SHARES[-1] + 1)
    head = np.exp(np.interp(np.log(place), np.log(middle), np.log(sums / sizes)))
    step = np.repeat(np.arange(len(sizes)), sizes)
    head *= (sums / np.bincount(step, head))[step]
    return -np.sort(-head)


def layer_popularity(calibration: Calibration, num_layers: int, num_experts: int, seed: int):
    """`[L, E] f64`: each layer's popularity, expert by expert; its layer means as published."""
    rng = np.random.default_rng((seed, 0))
    base = popularity(calibration.shares, calibration.tail, num_experts)
    sharpness = 1 + calibration.layer_spread * _normal_quantiles(num_layers, rng)[:, None]
    shape = base.copy()
    for _ in range(50 if calibration.layer_spread else 1):
        layers = shape**sharpness
        layers /= layers.sum(axis=1, keepdims=True)
        layers = -np.sort(-layers, axis=1)
        shape *= base / layers.mean(axis=0)
        shape /= shape.sum()
    field = rng.standard_normal((num_layers, num_experts))
    for e in range(1, num_experts):
        field[:, e] += calibration.neighbours * (field[:, e - 1] - field[:, e])
    rank = np.argsort(np.argsort(-field, axis=1), axis=1)
    return np.take_along_axis(layers, rank, axis=1)


def _normal_quantiles(count, rng):
    """`count` evenly spread quantiles of a normal distribution, in random order."""
    from statistics import NormalDist

    values = [NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)]
    return rng.permutation(values)


class SyntheticTrace:
    """Endless iterations from a `Calibration`; equal seeds give equal counts.

    Args:
      name: a key of `CALIBRATIONS`.
      calibration: in place of the named one.
      num_layers, num_experts, top_k: sizes, DeepSeek-V4-Pro's by default.
      num_iterations: iterations that a cut offers.
      seed: seeds placement and drift; the placement does not depend on the number of ranks.
    """

    def __init__(
        self,
        name: str = "mixed",
        calibration: Calibration | None = None,
        *,
        num_layers: int = 61,
        num_experts: int = 384,
        top_k: int = 6,
        num_iterations: int = 20,
        seed: int = 0,
    ):
        if calibration is None and name not in CALIBRATIONS:
            raise ValueError(f"synthetic trace {name!r} is not one of {', '.join(CALIBRATIONS)}")
        self.name = f"synthetic:{name}"
        self.notes: tuple[str, ...] = ()
        self.calibration = calibration or CALIBRATIONS[name]
        self.num_layers, self.num_experts, self.top_k = num_layers, num_experts, top_k
        self.num_iterations, self.seed = num_iterations, seed
        self.popularity = layer_popularity(self.calibration, num_layers, num_experts, seed)

    def cut(self, num_ranks: int, tokens_per_rank: int) -> Cut:
        """Iterations of exactly `tokens_per_rank * top_k` routes from each rank."""
        counts = self._counts(num_ranks, tokens_per_rank)
        return Cut(self.num_iterations, tokens_per_rank, (), counts)

    def _counts(self, num_ranks, tokens) -> Iterator[np.ndarray]:
        model, routes = self.calibration, tokens * self.top_k
        rng = np.random.default_rng((self.seed, 1, num_ranks))
        mean = self.popularity.astype(np.float32)
        # A rank's drift and the sampling noise of its routes are one normal draw.
        noise = np.sqrt(1 / (routes * np.maximum(mean, 1e-9)))[:, None].astype(np.float32)
        shared = _Drift(model.iteration_drift, model.persistence, (*mean.shape,), rng)
        own = _Drift(
            model.rank_drift, model.persistence, (mean.shape[0], num_ranks, mean.shape[1]), rng
        )
        for _ in range(self.num_iterations):
            log = own.step()
            log += shared.step()[:, None]
            fresh = rng.standard_normal(log.shape, dtype=np.float32)
            fresh *= np.minimum(noise, 1)
            log += fresh
            np.exp(log, out=log)
            log *= mean[:, None]
            yield round_to_sum(log, tokens, self.top_k, rng)


class _Drift:
    """A stationary first-order process of given spread."""

    def __init__(self, spread, persistence, shape, rng):
        self.spread, self.keep, self.rng, self.shape = spread, persistence, rng, shape
        self.state = None

    def step(self):
        if not self.spread:
            return np.zeros(self.shape, np.float32)
        fresh = self.rng.standard_normal(self.shape, dtype=np.float32)
        fresh *= self.spread
        if self.state is not None and self.keep:
            fresh *= np.float32(np.sqrt(1 - self.keep**2))
            fresh += np.float32(self.keep) * self.state
        self.state = fresh
        return fresh.copy()


def round_to_sum(weight, tokens: int, top_k: int, rng) -> np.ndarray:
    """Systematic sampling: i32 counts in proportion to `weight`, each within 1 of its mean.

    Rows (the last axis) sum to `tokens * top_k`, and no count is above `tokens`, because a token's
    experts are distinct: what an expert cannot take falls to the others.
    """
    total = tokens * top_k
    weight = _capped(weight / weight.sum(axis=-1, keepdims=True, dtype=np.float64), 1 / top_k)
    ends = np.cumsum(weight, axis=-1)
    ends *= total / ends[..., -1:]
    ends += rng.random((*ends.shape[:-1], 1))
    np.floor(ends, out=ends)
    ends[..., -1] = total
    np.minimum(ends, total, out=ends)
    return np.diff(ends, axis=-1, prepend=0).astype(np.int32)


def _capped(share, cap):
    """Shares of at most `cap` each (just below it); the rest of a row is scaled up to sum to 1."""
    if cap * np.count_nonzero(share, axis=-1).min() < 1:
        raise ValueError(f"a token's {round(1 / cap)} experts are more than there are to choose")
    cap = cap * (1 - 1e-9)
    while (over := (share > cap).any(axis=-1)).any():
        rows = share[over]
        full = rows >= cap
        rest = np.where(full, 0, rows)
        scale = (1 - cap * full.sum(axis=-1)) / np.maximum(rest.sum(axis=-1), 1e-300)
        share[over] = np.where(full, cap, rest * scale[..., None])
    return share
