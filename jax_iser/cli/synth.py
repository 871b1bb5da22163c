"""Writes a made-up trace to a file: synthetic:mixed, gsm8k or uniform, or workload:W0 to W7.

The file is our .npz: topk_ids [tokens, layers, top_k], request_lengths (a chunk of one rank in one
iteration is a request), num_experts and source_rank. Replaying it gives the counts of the trace.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.markup import escape

from jax_iser.cli._output import (
    UsageError,
    add_json_argument,
    check_writable,
    number,
    progress_console,
    result_console,
    write_json,
)
from jax_iser.cli._replay import MADE, add_size_arguments, make_trace

EXAMPLE = "jax-iser synth synthetic:mixed --ep 8 --tokens-per-rank 1024 --layers 4 --out mixed.npz"
ITERATIONS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="NAME", help="synthetic:NAME or workload:NAME")
    parser.add_argument("--out", required=True, metavar="FILE", help="the .npz to write")
    parser.add_argument(
        "--ep", type=number(int, 1, 72), default=8, metavar="P", help="source ranks (default 8)"
    )
    parser.add_argument(
        "--tokens-per-rank",
        type=number(int, 1, 2**24),
        default=8192,
        metavar="N",
        help="tokens of a rank in an iteration (default 8192)",
    )
    add_size_arguments(parser, ITERATIONS)
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    from jax_iser.replay.engine import why_not
    from jax_iser.replay.tokens_of_counts import write_counts

    check_writable("--json", args.json)
    check_writable("--out", args.out)
    if not args.trace.startswith(MADE):
        raise UsageError(f"{args.trace!r} does not start with {' or '.join(MADE)}")
    if not args.out.endswith(".npz"):
        raise UsageError(f"--out {args.out} does not end in .npz")
    trace = make_trace(args.trace, args, ITERATIONS)
    if reason := why_not(trace.num_experts, args.ep):
        raise UsageError(f"{reason}; choose --ep and --experts that divide")
    try:
        with progress_console().status(escape(f"making {trace.name}")):
            tokens = write_counts(args.out, trace, args.ep, args.tokens_per_rank)
    except ValueError as error:
        raise UsageError(str(error)) from None
    size = Path(args.out).stat().st_size
    result_console(args).print(
        f"{args.out}: {tokens} tokens x {trace.num_layers} layers x top {trace.top_k} of "
        f"{trace.num_experts}, {size / 1e6:.1f} MB",
        markup=False,
    )
    write_json(args.json, {"file": args.out, "tokens": tokens, "bytes": size})
    return 0
