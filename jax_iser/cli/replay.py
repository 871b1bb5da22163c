"""Replays recorded routing through balancing policies: what each would gain and would cost.

TRACE is a file or folder (our .npz, SGLang, vLLM, TensorRT-LLM or Megatron recordings), or a
made-up one: synthetic:mixed, synthetic:gsm8k, synthetic:uniform, workload:W0 to workload:W7.

columns, over the layer calls that have routes:
  EP, S       ranks, and helper slots of a rank
  R off, R    mean over calls of the largest rank's load over the mean, without and with the policy
  worst       the highest R of a call with the policy
  gone        share of R off - 1 that the policy removes
  copies, MB  experts received by ranks that do not own them, in a layer, and their bytes
  owner p50/99/max  expert payloads out of the busiest owner of a call: median, 99 %, most
  send, recv  change of the most routes that a rank sends out, and takes in
  no owner    share of broadcasts to a group of ranks that does not hold the expert's owner
  recur       share of replicas that the same rank held in the iteration before
  plans/s     plans of the policy per second, all threads together
  us off, us  modelled layer time without and with the policy, with --time-fit or --time-points
A dash stands for what does not apply: no excess to remove, no broadcast, nothing held before.
"""

from __future__ import annotations

import argparse

from rich import box
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from jax_iser.cli._output import (
    UsageError,
    add_json_argument,
    check_writable,
    number,
    print_table,
    progress_console,
    result_console,
    write_json,
)
from jax_iser.cli._replay import add_size_arguments, folder, integers, make_folder, open_all

EXAMPLE = "jax-iser replay synthetic:mixed --ep 4,8 --policy none,haloq,p2p --json -"
ITERATIONS = 20
TOKENS_PER_RANK = 8192
DEEPSEEK_V4_PRO_EXPERT_BYTES = 37_158_912


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="what to replay")
    parser.add_argument(
        "--ep",
        type=integers(1, 72),
        default=[4, 8, 16, 24],
        metavar="P,...",
        help="EP degrees (default 4,8,16,24)",
    )
    parser.add_argument(
        "--slots",
        type=integers(0, 16),
        default=[4],
        metavar="S,...",
        help="helper slots of a rank (default 4)",
    )
    parser.add_argument(
        "--tokens-per-rank",
        type=number(int, 1, 2**24),
        metavar="N",
        help="tokens of a rank in a call (default 8192); recorded counts have sizes of their own",
    )
    parser.add_argument(
        "--policy",
        action="append",
        metavar="NAME[:FIELD=VALUE]...,...",
        help="policies, or .py files that define one; default none,haloq. Names: none, haloq, "
        "haloq-owner, all-rank, p2p, p2p-capped, eplb-past, eplb-whole, lplb",
    )
    parser.add_argument(
        "--num-experts",
        type=number(int, 1, 1024),
        metavar="E",
        help="experts of recorded traces that do not state it; checked where they do",
    )
    parser.add_argument(
        "--threads", type=number(int, 1, 256), metavar="N", help="default: all cores"
    )
    add_size_arguments(parser, ITERATIONS)
    knobs = parser.add_argument_group("HALO-Q")
    knobs.add_argument(
        "--min-group-size",
        type=int,
        choices=(4, 2, 1),
        help="ranks of the smallest group that an expert is copied to (default 4)",
    )
    knobs.add_argument(
        "--min-routes",
        type=number(int, 0, 2**31 - 1),
        metavar="N",
        help="skip placements that move fewer routes (default 0)",
    )
    knobs.add_argument(
        "--gain-threshold",
        type=number(int, 0, 2**31 - 1),
        metavar="G",
        help="plan nothing for a call whose R is below this many thousandths (default 0)",
    )
    cost = parser.add_argument_group("costs")
    cost.add_argument(
        "--expert-bytes",
        type=number(int, 1, 2**50),
        default=DEEPSEEK_V4_PRO_EXPERT_BYTES,
        metavar="B",
        help="bytes of one expert (default 37158912, DeepSeek-V4-Pro's in NVFP4)",
    )
    cost.add_argument("--time-fit", metavar="A,B", help="layer time A + B*R in us, as 513,1051")
    cost.add_argument("--time-points", metavar="FILE", help="fit it to a JSON list of [R, us]")
    add_json_argument(parser)
    parser.add_argument("--plot", type=folder, metavar="DIR", help="write figures to a folder")


def run(args: argparse.Namespace) -> int:
    from jax_iser.replay.engine import NothingToReplay, why_not

    check_writable("--json", args.json)
    make_folder("--plot", args.plot)
    policies, fit = _policies(args), _time_fit(args)
    console = progress_console()
    traces = open_all(args.traces, args, ITERATIONS, console)
    _check_tokens(args, traces)
    rows, notes, skipped = [], [], []
    for trace in traces:
        notes += [f"{trace.name}: {note}" for note in trace.notes]
        for ep in dict.fromkeys(args.ep):
            if reason := why_not(trace.num_experts, ep):
                skipped.append(f"{trace.name}: {reason}")
                continue
            try:
                found, cut = _replay_one(args, trace, ep, policies, console)
            except NothingToReplay as reason:
                skipped.append(str(reason))
                continue
            rows += found
            notes += _without_routes(trace.name, found[0].figures)
            notes += [f"{trace.name}: {note}" for note in cut.notes]
    notes = list(dict.fromkeys(notes))
    for line in [*skipped, *notes]:
        console.print(f"note: {line}", style="dim", markup=False)
    if not rows:
        raise UsageError("nothing was replayed: " + "; ".join(skipped))
    _add_costs(rows, args, fit)
    _print_tables(result_console(args), rows, fit)
    figures = [row.figures for row in rows]
    write_json(args.json, {"rows": figures, "notes": notes, "skipped": skipped})
    if args.plot:
        _plot(args, traces, rows, console)
    return 0


KNOBS = ("min_group_size", "min_routes", "gain_threshold")


def _policies(args):
    from jax_iser.replay.policies import parse_policy

    names = [name for text in args.policy or ["none,haloq"] for name in text.split(",")]
    try:
        policies = [parse_policy(name) for name in names]
    except ValueError as error:
        raise UsageError(str(error)) from None
    for knob in _given_knobs(args):
        if not any(knob in policy.takes for policy in policies):
            raise UsageError(
                f"--{knob.replace('_', '-')} {getattr(args, knob)} has no policy to go to: none of "
                f"{', '.join(policy.label for policy in policies)} takes it from the command line"
            )
    return policies


def _given_knobs(args) -> dict[str, int]:
    """The planner's knobs that the command line has."""
    values = {name: getattr(args, name) for name in KNOBS}
    return {name: value for name, value in values.items() if value is not None}


def _check_tokens(args, traces):
    """Refuses a chunk size that no trace is cut by, and sets the one that was left out."""
    from jax_iser.replay.traces.counts import CountTrace

    if args.tokens_per_rank is None:
        args.tokens_per_rank = TOKENS_PER_RANK
    elif all(isinstance(trace, CountTrace) for trace in traces):
        raise UsageError(
            f"--tokens-per-rank {args.tokens_per_rank} cuts no trace: recorded counts are replayed "
            "step by step as they are; leave it out"
        )


def _time_fit(args):
    from jax_iser.replay.time_model import fit_points, parse_fit

    if args.time_fit and args.time_points:
        raise UsageError("--time-fit and --time-points exclude each other; give one")
    try:
        if args.time_fit:
            return parse_fit(args.time_fit)
        return fit_points(args.time_points) if args.time_points else None
    except ValueError as error:
        raise UsageError(str(error)) from None


def _replay_one(args, trace, ep, policies, console):
    from jax_iser.replay.engine import NothingToReplay, replay
    from jax_iser.replay.traces import TraceError

    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(escape(f"{trace.name} EP{ep}"), total=None)
        try:
            return replay(
                trace,
                ep,
                policies,
                slots=args.slots,
                tokens_per_rank=args.tokens_per_rank,
                max_iterations=args.iterations,
                num_threads=args.threads,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
                **_given_knobs(args),
            )
        except NothingToReplay:
            raise
        except (TraceError, ValueError) as error:
            raise UsageError(str(error)) from None


def _without_routes(name, figures) -> list[str]:
    """A note on layer calls that no figure counts."""
    if not (count := figures["calls_without_routes"]):
        return []
    calls = figures["iterations"] * figures["layers"]
    return [f"{name}: {count} of {calls} layer calls have no route and are left out of all figures"]


def _add_costs(rows, args, fit):
    for row in rows:
        figures = row.figures
        figures["remote_mb"] = figures["remote_copies"] * args.expert_bytes / 1e6
        figures["layer_us_off"] = fit(figures["imbalance_off"]) if fit else None
        figures["layer_us"] = fit(figures["imbalance"]) if fit else None


_COLUMNS = {
    "R off": lambda f: f"{f['imbalance_off']:.3f}",
    "R": lambda f: f"{f['imbalance']:.3f}",
    "worst": lambda f: f"{f['imbalance_worst']:.2f}",
    "gone": lambda f: _percent(f["excess_removed"], "{:.1f} %"),
    "copies": lambda f: f"{f['remote_copies']:.1f}",
    "MB": lambda f: f"{f['remote_mb']:,.0f}",
    "owner p50/99/max": lambda f: (
        f"{f['owner_copies_p50']:.0f}/{f['owner_copies_p99']:.0f}/{f['owner_copies_max']}"
    ),
    "send": lambda f: _percent(f["send_max_change"]),
    "recv": lambda f: _percent(f["recv_max_change"]),
    "no owner": lambda f: _percent(f["groups_without_owner"], "{:.0f} %"),
    "recur": lambda f: _percent(f["replicas_recur"], "{:.0f} %"),
    "plans/s": lambda f: f"{f['plans_per_s']:,.0f}" if f["plans_per_s"] else "-",
}


def _percent(value, form="{:+.1f} %"):
    return "-" if value is None else form.format(100 * value)


def _print_tables(console, rows, fit):
    """A table for each trace."""
    columns = dict(_COLUMNS)
    if fit:
        columns["us off"] = lambda f: f"{f['layer_us_off']:.0f}"
        columns["us"] = lambda f: f"{f['layer_us']:.0f}"
    for trace in dict.fromkeys(row.figures["trace"] for row in rows):
        table = Table(title=f"{trace}, mean over iterations and layers", box=box.SIMPLE_HEAD)
        for name in ("EP", "S", "policy", *columns):
            left = name == "policy"
            table.add_column(name, justify="left" if left else "right", no_wrap=True)
        for f in (row.figures for row in rows if row.figures["trace"] == trace):
            head = (str(f["ep"]), str(f["slots"]), f["policy"])
            table.add_row(*head, *(show(f) for show in columns.values()))
        print_table(console, table)


def _plot(args, traces, rows, console):
    from jax_iser.replay import figures
    from jax_iser.replay.engine import total_routes

    ep = rows[0].figures["ep"]
    replayed = {row.figures["trace"] for row in rows if row.figures["ep"] == ep}
    totals = {
        trace.name: total_routes(trace, ep, args.tokens_per_rank, args.iterations)
        for trace in [trace for trace in traces if trace.name in replayed][:4]
    }
    left = [trace.name for trace in traces if trace.name not in totals]
    if left:
        console.print(f"note: popularity is drawn without {', '.join(left)}", style="dim")
    made = [
        figures.imbalance_figure(rows, args.plot),
        figures.popularity_figure(totals, args.plot),
        figures.owner_figure(rows, args.plot),
        figures.objectives_figure(rows, args.plot),
    ]
    for path in filter(None, made):
        console.print(f"wrote {path}", markup=False)
