"""What a replay measures of each plan, and the figures of a table row."""

from __future__ import annotations

import time

import numpy as np

from jax_iser.replay.batch import Batch, Outcome, local_routes
from jax_iser.replay.policies.base import Policy


def imbalance(load: np.ndarray) -> np.ndarray:
    """`max / mean` over the last axis; 1 where there is no load."""
    mean = load.mean(axis=-1)
    return np.where(mean > 0, load.max(axis=-1) / np.maximum(mean, 1e-9), 1.0)


def recurring(slots: np.ndarray, before: np.ndarray) -> np.ndarray:
    """How many replicas of `slots [..., P, C]` the same rank held in `before`: `[...]`."""
    same = np.zeros(slots.shape, bool)
    for column in range(before.shape[-1]):
        same |= slots == before[..., column, None]
    same &= slots >= 0
    return same.reshape(*slots.shape[:-2], -1).sum(axis=-1)


def _held(slots):
    """Replicas on each rank, `[N, P]`; a loop, because sums over a short last axis are slow."""
    held = np.zeros(slots.shape[:2], np.int32)
    for column in range(slots.shape[2]):
        held += slots[:, :, column] >= 0
    return held


def unbalanced(batch: Batch) -> dict[str, np.ndarray]:
    """Each plan's routes, and its imbalance and largest send-out and receive-in off, `[N]`."""
    local = batch.local_before
    return {
        "routes": batch.load_before.sum(axis=1, dtype=np.int64),
        "imbalance_off": imbalance(batch.load_before),
        "send_off": (batch.sent - local).max(axis=1),
        "recv_off": (batch.load_before - local).max(axis=1),
    }


def balanced(batch: Batch, outcome: Outcome) -> dict[str, np.ndarray]:
    """The figures of each plan of an outcome, `[N]`."""
    local = local_routes(batch, outcome)
    held = _held(outcome.slots)
    return {
        "imbalance": imbalance(outcome.load),
        "send": (batch.sent - local).max(axis=1),
        "recv": (outcome.load - local).max(axis=1),
        "remote_copies": outcome.remote_copies,
        "owner_copies": outcome.owner_copies.max(axis=1),
        "broadcasts": outcome.broadcasts,
        "without_owner": outcome.without_owner,
        "slots_used": held.sum(axis=1),
        "slots_used_max": held.max(axis=1),
    }


class Meter:
    """Collects one policy's figures for some layers, batch by batch in order."""

    def __init__(self):
        self.seconds, self.num_plans = 0.0, 0
        self._fields: dict[str, list[np.ndarray]] = {}
        self._last = None

    def run(self, policy: Policy, batch: Batch) -> None:
        """Plans a batch and adds its figures; the time is that of the policy alone."""
        start = time.perf_counter()
        figures = policy.measure(batch)
        outcome = policy.plan(batch) if figures is None else None
        self.seconds += time.perf_counter() - start
        self.num_plans += batch.num_plans
        if figures is None:
            assert outcome is not None
            figures = unbalanced(batch) | balanced(batch, outcome)
            figures["replicas_stayed"] = self._stayed(batch, outcome.slots)
        figures["replicas_held"] = figures["slots_used"]
        for name, values in figures.items():
            values = np.asarray(values).reshape(-1, batch.num_layers)
            if not self._fields.get(name) and name == "replicas_held":
                values = np.concatenate([0 * values[:1], values[1:]])  # nothing was before it
            self._fields.setdefault(name, []).append(values)

    def _stayed(self, batch, slots):
        """Replicas that the same rank held in the iteration before, `[N]`."""
        slots = slots.reshape(len(batch.iterations), batch.num_layers, *slots.shape[1:])
        before = np.full_like(slots[:1], -1) if self._last is None else self._last
        self._last = slots[-1:].copy()
        return recurring(slots, np.concatenate([before, slots[:-1]]))

    def result(self) -> dict[str, np.ndarray]:
        """All figures, `[iterations, layers]`."""
        return {name: np.concatenate(parts) for name, parts in self._fields.items()}


def _ratio(part, whole):
    return float(part / whole) if whole else None


def _change(after, before):
    return float(after / before - 1) if before else None


def mean_by_layer(figures: dict[str, np.ndarray], name: str) -> np.ndarray:
    """`[L] f64`: a figure's mean over the calls of each layer that have routes, NaN without any."""
    routed = figures["routes"] > 0
    total = np.where(routed, figures[name], 0).sum(axis=0, dtype=np.float64)
    calls = routed.sum(axis=0)
    return np.divide(total, calls, out=np.full(len(total), np.nan), where=calls > 0)


def routed_calls(figures: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Each figure of the calls that have routes, `[M]`: the others have no imbalance."""
    return {name: values[figures["routes"] > 0] for name, values in figures.items()}


def summarize(figures: dict[str, np.ndarray], num_ranks: int) -> dict[str, float | int | None]:
    """A table row's figures from `[iterations, layers]` arrays: means, percentiles, worst.

    Calls without routes are counted in `calls_without_routes` and are in no other figure.
    `imbalance*` are over all plans but `imbalance_worst_layer`, the highest mean of a layer;
    `excess_removed` is the share of `imbalance_off - 1` that is gone; the changes of the largest
    send-out and receive-in are those of their means. None stands for 0/0.
    """
    iterations, layers = figures["imbalance"].shape
    worst_layer = float(np.nanmax(mean_by_layer(figures, "imbalance")))
    figures = routed_calls(figures)
    mean = {name: float(values.mean()) for name, values in figures.items()}
    total = {name: float(values.sum()) for name, values in figures.items()}
    on, owner = figures["imbalance"], figures["owner_copies"]
    p50, p99 = np.percentile(owner, (50, 99))
    return {
        "iterations": iterations,
        "layers": layers,
        "calls_without_routes": iterations * layers - on.size,
        "imbalance_off": mean["imbalance_off"],
        "imbalance": mean["imbalance"],
        "imbalance_p50": float(np.percentile(on, 50)),
        "imbalance_p99": float(np.percentile(on, 99)),
        "imbalance_worst": float(on.max()),
        "imbalance_worst_layer": worst_layer,
        "excess_removed": _ratio(
            mean["imbalance_off"] - mean["imbalance"], mean["imbalance_off"] - 1
        ),
        "remote_copies": mean["remote_copies"],
        "owner_copies_p50": float(p50),
        "owner_copies_p99": float(p99),
        "owner_copies_max": int(owner.max()),
        "slots_used": mean["slots_used"] / num_ranks,
        "slots_used_max": int(figures["slots_used_max"].max()),
        "send_max": mean["send"],
        "send_max_change": _change(mean["send"], mean["send_off"]),
        "recv_max": mean["recv"],
        "recv_max_change": _change(mean["recv"], mean["recv_off"]),
        "groups_without_owner": _ratio(total["without_owner"], total["broadcasts"]),
        "replicas_recur": _ratio(total["replicas_stayed"], total["replicas_held"]),
    }
