"""Options of `jax-iser prefill`, and how they must fit each other."""

from __future__ import annotations

import argparse

from jax_iser.cli import _model
from jax_iser.cli._output import UsageError, add_json_argument, check_writable, number
from jax_iser.methods import ALIASES, METHODS


def method_choices() -> list[str]:
    """Methods that run on several ranks, and their aliases."""
    names = [name for name, method in METHODS.items() if method.spans_ranks]
    return names + [alias for alias, name in ALIASES.items() if name in names]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All of them."""
    _model.add_model_argument(parser)
    add = parser.add_argument
    add(
        "--text",
        nargs="+",
        metavar="FILE",
        help="what to read (default: source files of Python's standard library)",
    )
    add(
        "--chunks",
        metavar="N",
        type=number(int, 1),
        default=6,
        help="chunks to read at most (default 6)",
    )
    add(
        "--ep",
        metavar="P",
        type=number(int, 1, 72),
        default=8,
        help="expert-parallel ranks (default 8)",
    )
    add(
        "--slots",
        metavar="S",
        type=number(int, 0, 16),
        default=4,
        help="helper slots of a rank (default 4)",
    )
    add(
        "--tokens-per-rank",
        metavar="N",
        type=number(int, 1),
        default=1024,
        help="bytes that a rank reads in a chunk (default 1024)",
    )
    add(
        "--sequence-length",
        metavar="N",
        type=number(int, 1),
        help="bytes of a sequence; a rank reads several (default 512, or those of a rank if fewer)",
    )
    add(
        "--ranks-per-device",
        metavar="V",
        type=number(int, 1),
        help="consecutive ranks that share a device (default: 1 on CPUs, as few as possible on the "
        "GPUs that there are)",
    )
    add(
        "--platform",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="auto: GPUs where jax has some and the package was built for them (default auto)",
    )
    add(
        "--arms",
        metavar="ARM,...",
        type=_arms,
        default=("off", "on", "fb"),
        help="what to run, out of off, on, fb (default all)",
    )
    add(
        "--min-group-size",
        type=int,
        choices=(4, 2, 1),
        default=4,
        help="ranks of the smallest group that an expert is copied to (default 4)",
    )
    add(
        "--method",
        choices=method_choices(),
        default="fused",
        help="portable: plain JAX, without copies and without times of layers (default fused)",
    )
    add(
        "--weight-dtype",
        choices=("float8_e4m3fn",),
        help="quantise the routed experts as they are read, and run in bf16; sizes must be "
        "multiples of 64 (default: as the model is stored, and f32 unless that is FP8)",
    )
    add(
        "--repeats",
        metavar="N",
        type=number(int, 1),
        default=3,
        help="runs of each chunk and arm; the least time of a layer's rank counts (default 3)",
    )
    add_json_argument(parser)
    add("--plot", metavar="FILE", help="picture of R and time per layer (PNG, SVG or PDF)")
    add("--record", metavar="TRACE.npz", help="write the routing taken as a trace for replay")
    several = parser.add_argument_group(
        "several processes on this host, on CPUs",
        "start the same command once for each --process-id",
    )
    several.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens")
    several.add_argument("--num-processes", metavar="N", type=number(int, 1))
    several.add_argument("--process-id", metavar="I", type=number(int, 0))


def _arms(text: str) -> tuple[str, ...]:
    arms = tuple(text.split(","))
    if not set(arms) <= {"off", "on", "fb"} or len(set(arms)) != len(arms):
        raise argparse.ArgumentTypeError(f"{text!r}: name each of off, on, fb at most once")
    return tuple(arm for arm in ("off", "on", "fb") if arm in arms)


def check(args: argparse.Namespace) -> int:
    """Checks options against each other; returns the number of devices over all processes."""
    if args.ep % args.ranks_per_device:
        raise UsageError(
            f"--ep {args.ep} is not divisible by --ranks-per-device {args.ranks_per_device}"
        )
    if args.sequence_length is None:
        args.sequence_length = min(512, args.tokens_per_rank)
    if args.tokens_per_rank % args.sequence_length:
        raise UsageError(
            f"--tokens-per-rank {args.tokens_per_rank} is not divisible by "
            f"--sequence-length {args.sequence_length}"
        )
    if args.record and set(args.arms) == {"fb"}:
        raise UsageError("--record with --arms fb: forced routing is no trace; add off or on")
    if args.plot and not args.plot.lower().endswith((".png", ".svg", ".pdf")):
        raise UsageError(f"--plot {args.plot} does not end in .png, .svg or .pdf")
    for option in ("json", "plot", "record"):
        check_writable(f"--{option}", getattr(args, option))
    several = (args.coordinator, args.num_processes, args.process_id)
    if any(value is not None for value in several) and None in several:
        raise UsageError("--coordinator, --num-processes and --process-id go together")
    num_devices = args.ep // args.ranks_per_device
    if args.coordinator:
        host, _, port = args.coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise UsageError(
                f"--coordinator {args.coordinator} is not HOST:PORT, such as 127.0.0.1:9876"
            )
        if args.process_id >= args.num_processes:
            raise UsageError(
                f"--process-id {args.process_id} is not below --num-processes {args.num_processes}"
            )
        if num_devices % args.num_processes:
            raise UsageError(
                f"{num_devices} devices (--ep / --ranks-per-device) are not divisible by "
                f"--num-processes {args.num_processes}"
            )
    return num_devices
