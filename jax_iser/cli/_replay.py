"""What the replay commands share: trace arguments and their parsing."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.markup import escape

from jax_iser.cli._output import UsageError, number
from jax_iser.replay.trace import Trace

MADE = ("synthetic:", "workload:")
# Sizes of made-up traces: DeepSeek-V4-Pro's. What the command line leaves out is None there.
SIZES = {"layers": 61, "experts": 384, "top_k": 6, "seed": 0}


def integers(low: int, high: int):
    """An argparse type: comma-separated integers from `low` to `high`."""
    one = number(int, low, high)
    return lambda text: [one(part) for part in text.split(",")]


def add_size_arguments(parser: argparse.ArgumentParser, iterations: int) -> None:
    """Sizes of made-up traces; DeepSeek-V4-Pro's by default."""
    made = parser.add_argument_group("synthetic: and workload: traces")
    made.add_argument(
        "--layers",
        type=number(int, 1, 1024),
        metavar="L",
        help="MoE layers (default 61)",
    )
    made.add_argument(
        "--experts",
        type=number(int, 1, 1024),
        metavar="E",
        help="experts of a layer (default 384)",
    )
    made.add_argument(
        "--top-k",
        type=number(int, 1, 64),
        metavar="K",
        help="experts of a token (default 6)",
    )
    made.add_argument("--seed", type=number(int, 0, 2**32 - 1), help="of what is drawn (default 0)")
    made.add_argument(
        "--iterations",
        type=number(int, 1, 10**6),
        metavar="I",
        help=f"iterations to make (default {iterations}); of recorded traces: at most so many",
    )


def make_trace(text: str, args: argparse.Namespace, iterations: int) -> Trace:
    """The trace that `synthetic:NAME` or `workload:NAME` names."""
    kind, _, name = text.partition(":")
    known = SIZES | _given(args)
    if known["top_k"] > known["experts"]:
        raise UsageError(
            f"--top-k {known['top_k']} exceeds --experts {known['experts']}: a token's experts are "
            "distinct"
        )
    sizes = {
        "num_layers": known["layers"],
        "num_experts": known["experts"],
        "top_k": known["top_k"],
        "num_iterations": args.iterations or iterations,
        "seed": known["seed"],
    }
    try:
        if kind == "synthetic":
            from jax_iser.replay.synthetic import SyntheticTrace

            return SyntheticTrace(name, **sizes)
        from jax_iser.replay.workload_trace import WorkloadTrace

        return WorkloadTrace(name, **sizes)
    except ValueError as error:
        raise UsageError(str(error).replace("num_experts=", "--experts ")) from None


def open_all(texts: list[str], args: argparse.Namespace, iterations: int, console) -> list[Trace]:
    """Every trace that the command line names, in order."""
    from jax_iser.replay.traces import TraceError, open_traces

    given = ["--" + name.replace("_", "-") for name in _given(args)]
    if given and not any(text.startswith(MADE) for text in texts):
        raise UsageError(
            f"{', '.join(given)} size made-up traces ({' or '.join(MADE)}...), and none is named; "
            "leave them out: recorded ones have sizes of their own"
        )
    if args.num_experts is not None and all(text.startswith(MADE) for text in texts):
        raise UsageError(
            f"--num-experts {args.num_experts} is of recorded traces, and none is named; --experts "
            "sizes made-up ones"
        )
    traces: list[Trace] = []
    for text in texts:
        if text.startswith(MADE):
            traces.append(make_trace(text, args, iterations))
            continue
        if not Path(text).exists():
            raise UsageError(
                f"trace {text} does not exist (made-up ones are {' or '.join(MADE)}...)"
            )
        try:
            with console.status(escape(f"reading {text}")):
                traces += open_traces(text, args.num_experts)
        except TraceError as error:
            raise UsageError(str(error)) from None
    return traces


def _given(args):
    """Those of SIZES that the command line has."""
    values = {name: getattr(args, name) for name in SIZES}
    return {name: value for name, value in values.items() if value is not None}


def make_folder(option: str, path: Path | None) -> None:
    """Makes a folder for results now, not after minutes of work."""
    try:
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{option} {path} cannot be made: {error.strerror or error}") from None


def folder(text: str) -> Path:
    """An argparse type: a folder that can be made."""
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a file, not a folder")
    return path
