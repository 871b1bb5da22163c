"""Explains one plan: how HALO-Q would balance a layer call, from the routes that each rank has for
each expert. COUNTS holds integers [ranks, experts]: row s, column e is the number of (token, k)
assignments of source rank s to expert e; expert e lives on rank e // (experts / ranks). Or it is a
trace, as jax-iser replay reads them, of which one layer call is planned."""

from __future__ import annotations

import argparse
import tokenize
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from jax_iser.cli._output import (
    UsageError,
    add_json_argument,
    bar,
    check_writable,
    make_table,
    number,
    print_table,
    progress_console,
    result_console,
    write_json,
)
from jax_iser.cli._plan_trace import (
    add_trace_arguments,
    counts_of_trace,
    is_trace,
    refuse_trace_arguments,
)
from jax_iser.plan import COPY_RULES, group_levels, plan_counts, plan_many

EXAMPLE = "jax-iser plan counts.csv --slots 2 --min-group-size 1"
HOW = ("owner_direct", "sami", "resident")
_MAX_FLOW_COLUMNS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    count = number(int, 0, 2**31 - 1)
    add(
        "counts",
        metavar="COUNTS",
        help="integers [ranks, experts], .npy or comma-separated .csv; or a recorded trace",
    )
    add(
        "--slots",
        metavar="S",
        type=number(int, 0, 16),
        default=4,
        help="helper slots of a rank (default 4)",
    )
    add(
        "--min-group-size",
        type=int,
        choices=(4, 2, 1),
        default=4,
        help="ranks of the smallest group that an expert is copied to (default 4)",
    )
    add(
        "--min-routes",
        metavar="N",
        type=count,
        default=0,
        help="skip placements that move fewer (default 0)",
    )
    add(
        "--gain-threshold",
        metavar="N",
        type=count,
        default=0,
        help="plan nothing while R, the largest load over the mean, is below this many thousandths "
        "(default 0)",
    )
    add(
        "--copy-rule",
        choices=COPY_RULES,
        default="owner_direct",
        help="who sends an expert: its owner to all members (owner_direct), every member a share "
        "(sami), or one or the other by helper slot (per_slot) (default owner_direct)",
    )
    add(
        "--resident",
        metavar="FILE",
        help="expert that each helper slot holds already, [ranks, slots], -1 for none (.npy, .csv)",
    )
    add_trace_arguments(parser)
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    check_writable("--json", args.json)
    if is_trace(args.counts):
        counts, what = counts_of_trace(args)
        progress_console().print(what, style="dim")
    else:
        refuse_trace_arguments(args)
        counts = read_integers(args.counts)
    resident = None
    if args.resident is not None:
        resident = read_integers(args.resident, "[ranks, slots]")
    knobs: dict[str, Any] = {
        "num_helper_slots": args.slots,
        "min_group_size": args.min_group_size,
        "min_routes": args.min_routes,
        "gain_threshold": args.gain_threshold,
        "copy_rule": args.copy_rule,
    }
    try:
        plan = plan_counts(counts, **knobs, resident=resident)
        # Residency moves no route, so that it has no part in the flow.
        flow = plan_many(counts[None], **knobs, with_flow=True, num_threads=1).flow
    except ValueError as error:
        path = args.resident if str(error).startswith("resident") else args.counts
        raise UsageError(f"{path}: {error}") from error
    assert flow is not None
    result = explain(plan, flow[0], args.min_group_size)
    _print(result_console(args), result)
    write_json(args.json, result)
    return 0


def read_integers(path: str, axes: str = "[ranks, experts]") -> np.ndarray:
    """A 2-D integer array from .npy (never unpickled) or .csv.

    Raises:
      UsageError: the file cannot be read, or holds something else.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in (".npy", ".csv"):
        raise UsageError(f"{path} is neither .npy nor .csv, and no trace that there is")
    try:
        array = _read_npy(path) if suffix == ".npy" else _read_csv(path)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    except (
        ValueError,
        OverflowError,
        EOFError,
        MemoryError,
        SyntaxError,
        tokenize.TokenError,
        zipfile.BadZipFile,
    ) as error:
        raise UsageError(f"{path} does not hold integers: {error}") from error
    if not isinstance(array, np.ndarray):
        raise UsageError(f"{path} is an archive of arrays, expected one array as .npy")
    if array.ndim != 2 or array.dtype.kind not in "iu" or not array.size:
        raise UsageError(
            f"{path} holds {array.dtype} of shape {array.shape}, expected integers {axes}, a row "
            "a rank, as of numpy.save(path, array.astype(int))"
        )
    return array


def _read_npy(path: str):
    with open(path, "rb") as stream:
        return np.load(stream, allow_pickle=False)


def _read_csv(path: str) -> np.ndarray:
    """A line a rank; `#` begins a comment."""
    rows: list[list[int]] = []
    for line_number, line in enumerate(Path(path).read_text("utf-8-sig").splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        try:
            rows.append([int(field) for field in line.split(",")])
        except ValueError as error:
            raise ValueError(f"line {line_number}: {error}") from None
        if len(rows[-1]) != len(rows[0]):
            raise ValueError(
                f"line {line_number}: found {len(rows[-1])} numbers, expected {len(rows[0])} as in "
                "the first; a line is a rank"
            )
    return np.array(rows, np.int64, ndmin=2)


def explain(plan, flow: np.ndarray, min_group_size: int) -> dict:
    """A `CountsPlan` and its flow `[P, P]` in words; docs/cli.md describes the keys."""
    levels = group_levels(len(plan.load), min_group_size)

    def describe(row, quota):
        expert, owner, level, group, slot, how = map(int, row)
        members = list(levels[level].members(group))
        hosts = sorted({*members, owner})
        return {
            "expert": expert,
            "owner": owner,
            "level": level,
            "group": group,
            "members": members,
            "slot": slot,
            "how": HOW[how],
            "quota": {str(rank): int(quota[rank]) for rank in hosts},
        }

    used = plan.num_broadcasts
    rows = zip(plan.broadcasts[:used], plan.quota[:used], strict=True)
    return {
        "target": int(plan.target),
        "load_before": plan.load_before.tolist(),
        "load": plan.load.tolist(),
        "imbalance_before": _imbalance(plan.load_before),
        "imbalance": _imbalance(plan.load),
        "broadcasts": [describe(row, quota) for row, quota in rows],
        "flow": flow.tolist(),
    }


def _imbalance(load) -> float:
    total = int(load.sum(dtype=np.int64))
    return len(load) * int(load.max()) / total if total else 1.0


def _print(console, result: dict) -> None:
    before, after = result["load_before"], result["load"]
    console.print(f"Loads, routes a rank computes; the water level is {result['target']:,}")
    longest = max(*before, *after, 1)
    width = len(f"{longest:,}")
    for rank, (was, now) in enumerate(zip(before, after, strict=True)):
        console.print(f"rank {rank:>2}  before {was:>{width},}  {bar(was, longest, mark='░')}")
        console.print(f"{'':7}  after  {now:>{width},}  {bar(now, longest)}")
    r_before, r_after = result["imbalance_before"], result["imbalance"]
    console.print(f"R, max over mean: {r_before:.3f} before, {r_after:.3f} after\n")
    _print_broadcasts(console, result["broadcasts"])
    _print_flow(console, result["flow"])


def _print_broadcasts(console, broadcasts: list[dict]) -> None:
    if not broadcasts:
        console.print("No broadcasts: nothing is copied, every route runs at its expert's home.\n")
        return
    plural = "s" if len(broadcasts) > 1 else ""
    console.print(f"{len(broadcasts)} broadcast{plural}, in placement order")
    table = make_table("expert", "owner", "level", "group", "slot", "how")
    for name in ("members", "quota, rank: routes"):
        table.add_column(name, justify="left")
    for row in broadcasts:
        cells = (row["expert"], row["owner"], row["level"], row["group"], row["slot"], row["how"])
        members = row["members"]
        table.add_row(
            *map(str, cells),
            str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}",
            "  ".join(f"{rank}: {routes:,}" for rank, routes in row["quota"].items() if routes),
        )
    print_table(console, table)


def _print_flow(console, flow: list[list[int]]) -> None:
    """Who sends how much to whom; for many ranks, where each rank's largest flows go."""
    ranks = range(len(flow))
    if len(flow) <= _MAX_FLOW_COLUMNS:
        console.print("Routes by source rank (rows) and computing rank (columns)")
        table = make_table("from", *map(str, ranks))
        for source in ranks:
            table.add_row(str(source), *(f"{routes:,}" for routes in flow[source]))
        print_table(console, table)
        return
    console.print("Routes by source rank: the four largest flows of each (--json has all)")
    for source in ranks:
        largest = sorted(ranks, key=lambda rank: (-flow[source][rank], rank))[:4]
        flows = "  ".join(f"to {rank}: {flow[source][rank]:,}" for rank in largest)
        console.print(f"from {source:>2}  {flows}")
