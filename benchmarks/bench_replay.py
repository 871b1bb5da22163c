"""Replay: the tables of docs/replay.md beside the paper's, and its speed against bare planning.

Recorded traces are those of `--traces`, a folder of .npz files; without it that part is left out.
`make docs-tables` puts the tables into docs/replay.md.
"""

from __future__ import annotations

import time
from pathlib import Path

import _report
import numpy as np
from replay_tables import (
    calibration_table,
    made_table,
    mixed_tables,
    recorded_table,
    speed_table,
)

from jax_iser import _iser
from jax_iser.replay.engine import replay, usable_cores
from jax_iser.replay.policies import parse_policy
from jax_iser.replay.synthetic import SyntheticTrace
from jax_iser.replay.trace import Cut
from jax_iser.replay.traces import open_traces
from jax_iser.replay.workload_trace import WorkloadTrace
from jax_iser.replay.workloads import WORKLOADS

EPS, ITERATIONS = (4, 8, 16, 24), 40
POLICIES = (
    "none",
    "haloq",
    "haloq:slots=3",
    "haloq:min_group_size=1",
    "haloq:resident=1",
    "haloq-owner",
    "all-rank",
    "all-rank:choose=rank",
    "p2p",
    "p2p-capped",
    "eplb-past",
    "eplb-whole",
    "lplb",
)
RECORDED = Path(__file__).resolve().parents[2] / "shared" / "traces" / "gpt_oss_20b"


class Memory:
    """A trace whose iterations are in memory: what is timed is the replay alone."""

    top_k, notes, name = 6, (), "memory"

    def __init__(self, iterations):
        self.iterations = iterations
        self.num_layers, _, self.num_experts = iterations[0].shape

    def cut(self, num_ranks, tokens_per_rank):
        return Cut(len(self.iterations), tokens_per_rank, (), iter(self.iterations))


# What of a row is kept: the JSON is for people to compare.
FIELDS = (
    "trace",
    "ep",
    "slots",
    "policy",
    "tokens_per_rank",
    "iterations",
    "imbalance_off",
    "imbalance",
    "imbalance_worst",
    "imbalance_worst_layer",
    "excess_removed",
    "remote_copies",
    "owner_copies_p50",
    "owner_copies_p99",
    "owner_copies_max",
    "send_max_change",
    "recv_max_change",
    "groups_without_owner",
    "replicas_recur",
)


def figures(trace, ep, policies, **options) -> tuple[list[dict], tuple[str, ...]]:
    """Rows of one replay, and what it says it assumed."""
    rows, cut = replay(trace, ep, [parse_policy(name) for name in policies], **options)
    kept = [{name: row.figures[name] for name in FIELDS} for row in rows]
    return [{k: round(v, 6) if isinstance(v, float) else v for k, v in r.items()} for r in kept], (
        cut.notes
    )


def mixed() -> list[dict]:
    """Every policy on the mixed trace."""
    rows = []
    for ep in EPS:
        rows += figures(SyntheticTrace("mixed", num_iterations=ITERATIONS), ep, POLICIES)[0]
        _report.say(f"mixed EP{ep}: {len(POLICIES)} policies")
    return rows


def repair_gain(ep: int, iterations: int = 4) -> dict:
    """What quota repair alone changes in the largest send-out and receive-in."""
    from jax_iser.replay.batch import Batch
    from jax_iser.replay.metrics import balanced
    from jax_iser.replay.policies import greedy

    counts = list(SyntheticTrace("mixed", num_iterations=iterations).cut(ep, 8192).counts)
    results, repair = [], greedy.repair
    for step in (repair, lambda *_: None):
        greedy.repair = step
        batch = Batch(counts)
        results.append(balanced(batch, greedy.OwnerGroups(owner_only=0).plan(batch)))
    greedy.repair = repair
    on, off = results
    change = {name: on[name].mean() / off[name].mean() - 1 for name in ("send", "recv")}
    return {"ep": ep} | {name: float(value) for name, value in change.items()}


def seeds() -> list[dict]:
    """Imbalance of other placements and drifts of the same calibration."""
    rows = []
    for seed in range(8):
        for ep in EPS:
            trace = SyntheticTrace("mixed", num_iterations=8, seed=seed)
            found, _ = figures(trace, ep, ("none", "haloq"))
            rows.append({"seed": seed, "ep": ep, "off": found[0]["imbalance"]})
            rows[-1]["on"] = found[1]["imbalance"]
    return rows


def made() -> list[dict]:
    """GSM8K, uniform and W0 to W7."""
    traces = [SyntheticTrace(name, num_iterations=8) for name in ("gsm8k", "uniform")]
    traces += [WorkloadTrace(name, num_iterations=8) for name in WORKLOADS]
    return [row for t in traces for ep in EPS for row in figures(t, ep, ("none", "haloq"))[0]]


def recorded(folder: Path) -> list[dict]:
    """The recorded workloads: at 8,192 tokens/rank, which none can fill, and at 256."""
    rows = []
    policies = ("haloq", "haloq:min_group_size=1", "haloq-owner", "p2p", "p2p-capped", "lplb")
    for trace in open_traces(folder):
        for tokens in (8192, 256):
            for ep in (4, 8, 16):
                found, notes = figures(trace, ep, policies, tokens_per_rank=tokens)
                rows += [row | {"asked": tokens, "notes": notes} for row in found]
    return rows


def speed(repeats: int, iterations: int = 100) -> list[dict]:
    """Seconds of the whole replay of HALO-Q and of bare planner calls on the same counts."""
    return [speed_at(ep, repeats, iterations) for ep in EPS]


def speed_at(ep: int, repeats: int, iterations: int) -> dict:
    """The same at one EP degree; `cores` is CPU time over wall time of the replay."""
    threads, policy = usable_cores(), [parse_policy("haloq")]
    trace = Memory(list(SyntheticTrace("mixed", num_iterations=iterations).cut(ep, 8192).counts))
    counts = np.concatenate(trace.iterations)
    cases = {
        "bare": lambda: _iser.plan_many(counts, None, 4, 4, 0, 0, 1, threads, False),
        "replay": lambda: replay(trace, ep, policy, num_threads=threads),
        "one": lambda: replay(trace, ep, policy, num_threads=1),
    }
    seconds = _report.medians(cases, repeats)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        cases["replay"]()
    cores = (time.process_time() - cpu) / (time.perf_counter() - wall)
    _report.say(f"speed EP{ep}: {seconds}, {cores:.2f} cores busy")
    plans = len(counts)
    return {"ep": ep, "plans": plans, **seconds, "cores": cores, "per_s": plans / seconds["replay"]}


def main() -> None:
    parser = _report.parser(__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, default=RECORDED, metavar="DIR")
    parser.add_argument("--only-speed", action="store_true", help="leave out all but the speed")
    args = parser.parse_args()
    found = {"speed": speed(args.repeats)}
    tables = {"speed": speed_table(found["speed"])}
    if not args.only_speed:
        found |= {"mixed": mixed(), "seeds": seeds(), "made": made()}
        found["repair"] = [repair_gain(ep) for ep in EPS]
        tables["mixed"] = mixed_tables(found["mixed"], found["repair"])
        tables["seeds"] = calibration_table(found["seeds"])
        tables["made"] = made_table(found["made"])
    if args.traces.is_dir() and not args.only_speed:
        found["recorded"] = recorded(args.traces)
        tables["recorded"] = recorded_table(found["recorded"])
    for name, table in tables.items():
        _report.say(f"\n{name}\n\n{table}")
    _report.write(args, found)


if __name__ == "__main__":
    main()
