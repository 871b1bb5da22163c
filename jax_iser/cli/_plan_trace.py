"""Counts of one layer call of a recorded trace, for `jax-iser plan`."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import numpy as np

from jax_iser.cli._output import UsageError, number

# What is left out on the command line is None there.
DEFAULTS = {"ep": 8, "layer": 0, "iteration": 0, "tokens_per_rank": 8192, "num_experts": None}


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that say which call of a trace is planned."""
    add = parser.add_argument_group("COUNTS that is a trace").add_argument
    add("--ep", type=number(int, 1, 72), metavar="P", help="ranks (default 8)")
    add(
        "--layer",
        type=number(int, 0, 1023),
        metavar="L",
        help="layer, of those that have routes, from 0 (default 0)",
    )
    add(
        "--iteration",
        type=number(int, 0, 2**31 - 1),
        metavar="I",
        help="call of the layer, from 0 (default 0)",
    )
    add(
        "--tokens-per-rank",
        type=number(int, 1, 2**24),
        metavar="N",
        help="tokens of a rank in a call (default 8192)",
    )
    add(
        "--num-experts",
        type=number(int, 1, 1024),
        metavar="E",
        help="for traces that do not state it",
    )


def is_trace(path: str) -> bool:
    """Whether a path is a trace rather than one matrix of counts."""
    from jax_iser.replay.traces import TraceError
    from jax_iser.replay.traces.archive import read_header

    suffix = Path(path).suffix.lower()
    if suffix == ".csv" or not Path(path).exists():
        return False
    if suffix != ".npy" or Path(path).is_dir():
        return True
    try:
        with open(path, "rb") as stream:
            header = read_header(path, "array", stream, objects=True)
    except (TraceError, OSError):
        return False  # the reader of matrices says what is wrong
    return len(header.shape) == 3 or (header.shape == () and header.dtype.hasobject)


def refuse_trace_arguments(args: argparse.Namespace) -> None:
    """Raises UsageError where options of a trace go with a matrix of counts."""
    given = [name for name in DEFAULTS if getattr(args, name) is not None]
    if given:
        options = ", ".join("--" + name.replace("_", "-") for name in given)
        raise UsageError(
            f"{options} choose a call of a trace, but {args.counts} is one matrix of counts; leave "
            "them out"
        )


def counts_of_trace(args: argparse.Namespace) -> tuple[np.ndarray, str]:
    """`[P, E] i32` of the call that the command line names, and what it is, in a line.

    Raises:
      UsageError: the trace cannot be read, or has no such call.
    """
    from jax_iser.replay.engine import why_not
    from jax_iser.replay.traces import TraceError, open_traces

    asked = {name: getattr(args, name) for name in DEFAULTS}
    asked = DEFAULTS | {name: value for name, value in asked.items() if value is not None}
    ranks, layer, iteration = asked["ep"], asked["layer"], asked["iteration"]
    try:
        traces = open_traces(args.counts, asked["num_experts"])
        if len(traces) > 1:
            names = ", ".join(str(getattr(trace, "path", trace.name)) for trace in traces[:3])
            raise UsageError(f"{args.counts} holds {len(traces)} traces ({names}...); name one")
        (trace,) = traces
        if reason := why_not(trace.num_experts, ranks):
            raise UsageError(f"{args.counts}: {reason}; choose another --ep")
        cut = trace.cut(ranks, asked["tokens_per_rank"])
        sizes = (("layer", layer, trace.num_layers), ("iteration", iteration, cut.num_iterations))
        for name, value, size in sizes:
            if value >= size:
                raise UsageError(f"{args.counts}: --{name} {value} is not below its {size} {name}s")
        counts = next(itertools.islice(cut.counts, iteration, None))[layer]
    except TraceError as error:
        raise UsageError(str(error)) from None
    what = f"{trace.name}: layer {layer} of {trace.num_layers}, iteration {iteration} of "
    what += f"{cut.num_iterations}, EP{ranks}"
    notes = dict.fromkeys((*trace.notes, *cut.notes))
    return counts, "\n".join([what, *(f"note: {note}" for note in notes)])
