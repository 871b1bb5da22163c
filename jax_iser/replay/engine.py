"""Replays a trace through policies: blocks of iterations, layers shared out over threads."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from jax_iser.limits import MAX_EXPERTS, MAX_RANKS
from jax_iser.replay.batch import Batch
from jax_iser.replay.metrics import Meter, mean_by_layer, routed_calls, summarize
from jax_iser.replay.policies import PolicyMaker
from jax_iser.replay.trace import Cut, Trace

BLOCK_BYTES = 12 * 2**20


class NothingToReplay(ValueError):  # noqa: N818
    """A trace has nothing for an EP degree; the text says why."""


@dataclasses.dataclass
class Row:
    """One line of a replay's table.

    Attributes:
      figures: the JSON fields, see `metrics.summarize`.
      layers_off, layers_on: `[L]` mean imbalance of each layer, NaN for one without routes.
      routes: mean largest send-out and receive-in, off and on.
    """

    figures: dict
    layers_off: np.ndarray
    layers_on: np.ndarray
    routes: tuple[float, float, float, float]


def why_not(num_experts: int, num_ranks: int) -> str | None:
    """Why an EP degree cannot be replayed, or None."""
    if not 1 <= num_ranks <= MAX_RANKS:
        return f"EP{num_ranks} skipped: it is outside 1..{MAX_RANKS} ranks"
    if num_experts > MAX_EXPERTS:
        return f"EP{num_ranks} skipped: {num_experts} experts are above {MAX_EXPERTS}"
    if num_experts % num_ranks:
        return f"EP{num_ranks} skipped: {num_experts} experts do not divide over {num_ranks} ranks"
    return None


def replay(
    trace: Trace,
    num_ranks: int,
    policies: list[PolicyMaker],
    *,
    slots: Iterable[int] = (4,),
    tokens_per_rank: int = 8192,
    max_iterations: int | None = None,
    num_threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    **knobs,
) -> tuple[list[Row], Cut]:
    """Replays one trace at one EP degree.

    Args:
      trace: what to replay.
      num_ranks: ranks `P`; divides the trace's experts.
      policies: makers from `parse_policy`.
      slots: helper slots per rank; each policy is replayed with each.
      tokens_per_rank: tokens of a rank in an iteration.
      max_iterations: stop after so many.
      num_threads: threads that share the layers, all cores by default.
      progress: called with iterations done and in all.
      **knobs: fields given to every policy that has them.

    Returns:
      A row for each number of slots and policy, in that order, and the cut that was replayed.

    Raises:
      NothingToReplay: where the trace yields no iteration or no route.
      ValueError: where a size does not divide.
    """
    if reason := why_not(trace.num_experts, num_ranks):
        raise ValueError(reason)
    cut = trace.cut(num_ranks, tokens_per_rank)
    count = min(cut.num_iterations, max_iterations or cut.num_iterations)
    if not count:
        raise NothingToReplay(
            f"EP{num_ranks} skipped: {trace.name} has fewer tokens than {num_ranks} ranks"
        )
    routes = cut.tokens_per_rank * trace.top_k * num_ranks
    if routes >= 2**31:
        raise ValueError(
            f"{cut.tokens_per_rank} tokens/rank with {trace.top_k} experts each on {num_ranks} "
            f"ranks are {routes} routes, and a plan takes at most {2**31 - 1}; use fewer tokens"
        )
    jobs = _jobs(policies, slots)
    spans = _layer_spans(trace.num_layers, num_threads or usable_cores())
    team = [[make(slots=s, **knobs) for make, s in jobs] for _ in spans]
    meters = [[Meter() for _ in jobs] for _ in spans]
    _fit(trace, num_ranks, tokens_per_rank, count, spans, team)
    _drive(itertools.islice(cut.counts, count), spans, team, meters, count, progress)
    rows: list[Row] = []
    for index, (make, s) in enumerate(jobs):
        parts = [meters[span][index] for span in range(len(spans))]
        head = {"trace": trace.name, "ep": num_ranks, "slots": s, "policy": make.label}
        head["tokens_per_rank"] = cut.tokens_per_rank
        head["min_group_size"] = getattr(team[0][index], "min_group_size", None)
        rows.append(_row(head, parts))
    return rows, cut


def _jobs(policies, slots):
    """Each policy with each number of slots, or with its own, and none twice."""
    jobs = {(make.label, make(slots=s).slots): (make, s) for s in slots for make in policies}
    return [(make, s) for (_, s), (make, _) in jobs.items()]


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _layer_spans(num_layers, num_threads):
    """Layers shared out evenly, one span a thread."""
    cuts = np.linspace(0, num_layers, min(num_threads, num_layers) + 1).astype(int)
    return [slice(int(a), int(b)) for a, b in itertools.pairwise(cuts)]


def total_routes(trace: Trace, num_ranks: int, tokens_per_rank: int, count: int | None):
    """`[L, E] i64`: the routes of a trace's first `count` iterations (None: of all)."""
    totals = np.zeros((trace.num_layers, trace.num_experts), np.int64)
    for counts in itertools.islice(trace.cut(num_ranks, tokens_per_rank).counts, count):
        totals += counts.sum(axis=1)
    return totals


def _fit(trace, num_ranks, tokens_per_rank, count, spans, team):
    """Shows the whole trace's loads to the policies that ask for them: a pass of its own."""
    if not any(policy.needs_totals for policy in team[0]):
        return
    totals = total_routes(trace, num_ranks, tokens_per_rank, count)
    for span, policies in zip(spans, team, strict=True):
        for policy in policies:
            if policy.needs_totals:
                policy.fit(totals[span])


def _blocks(iterations):
    """Lists of iterations of about `BLOCK_BYTES` in all."""
    block, size = [], 0
    for counts in iterations:
        block.append(counts)
        size += counts.nbytes
        if size >= BLOCK_BYTES:
            yield block
            block, size = [], 0
    if block:
        yield block


def _drive(iterations, spans, team, meters, count, progress):
    """Every block through every span's policies; the next block is read while these plan."""
    done, pending = 0, list[Future]()
    with ThreadPoolExecutor(len(spans)) as pool:
        for block in _blocks(iterations):
            for future in pending:
                future.result()
            pending = [
                pool.submit(_plan, block, *job) for job in zip(spans, team, meters, strict=True)
            ]
            done += len(block)
            if progress:
                progress(done, count)
        for future in pending:
            future.result()


def _plan(block, span, policies, meters):
    batch = Batch([counts[span] for counts in block], span.start)
    for policy, meter in zip(policies, meters, strict=True):
        meter.run(policy, batch)


def _row(head, parts: list[Meter]) -> Row:
    results = [part.result() for part in parts]
    figures = {name: np.concatenate([r[name] for r in results], axis=1) for name in results[0]}
    if not figures["routes"].any():
        raise NothingToReplay(
            f"EP{head['ep']} skipped: no route in the {len(figures['routes'])} iterations of "
            f"{head['trace']} that are replayed"
        )
    # Threads plan side by side, so their times are averaged, not added.
    seconds = sum(part.seconds for part in parts) / len(parts)
    plans = sum(part.num_plans for part in parts)
    speed = {"plans_per_s": plans / seconds if seconds else None}
    routed = routed_calls(figures)
    send_off, send, recv_off, recv = (
        float(routed[name].mean()) for name in ("send_off", "send", "recv_off", "recv")
    )
    return Row(
        head | summarize(figures, head["ep"]) | speed,
        mean_by_layer(figures, "imbalance_off"),
        mean_by_layer(figures, "imbalance"),
        (send_off, send, recv_off, recv),
    )
