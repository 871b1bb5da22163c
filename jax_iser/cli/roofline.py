"""Peak-rate model of a layer: do expert copies hide behind computation (paper section 3.1)?

A scenario is a device, a model, tokens per rank and copies per rank; it is above the device's line
when token traffic and copies fit beside the computation at peak rates.

columns of the first table:
  copies       expert copies that a rank receives in the layer
  routed only  FLOP of the routed experts per byte of token traffic and copies
  with shared  the same with the shared expert's FLOP, weighted by how much slower it runs
  line         FLOP/B above which traffic and copies hide; * marks what is below

The second table has the times of the first device, model and number of tokens.
"""

from __future__ import annotations

import argparse
import math

from rich import box
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
from jax_iser.cli._replay import folder, integers, make_folder

EXAMPLE = "jax-iser roofline --device H200:1.979:450:2 --model mine:4096:2048:8:1:4096:48 --json -"

_DEVICE = "NAME:PFLOPS:GBPS:WEIGHT"
_MODEL = "NAME:WIDTH:I:K:SHARED:SHARED_WIDTH[:LAYERS]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        action="append",
        metavar=_DEVICE,
        help="dense PFLOP/s of the routed experts, GB/s per direction, and how many times slower "
        "the shared expert runs; repeat it for several devices; default GB300 and VR200",
    )
    parser.add_argument(
        "--model",
        action="append",
        metavar=_MODEL,
        help="expert input width, intermediate size, top-k, shared experts, their width and the "
        "layers (default 61); repeat it for several models; default DeepSeek-V4-Pro and Kimi K3",
    )
    parser.add_argument(
        "--tokens-per-rank",
        type=integers(1, 2**24),
        default=[8192, 16384],
        help="tokens of a rank (default 8192,16384)",
    )
    parser.add_argument(
        "--copies",
        type=integers(0, 64),
        default=[0, 1, 2, 4],
        help="copies a rank receives (default 0,1,2,4)",
    )
    parser.add_argument(
        "--ep", type=number(int, 1, 1024), default=8, metavar="P", help="EP degree (default 8)"
    )
    parser.add_argument(
        "--slots",
        type=number(int, 0, 16),
        default=4,
        metavar="S",
        help="helper slots of a rank (default 4)",
    )
    add_json_argument(parser)
    parser.add_argument("--plot", type=folder, metavar="DIR", help="write the figure to a folder")


def run(args: argparse.Namespace) -> int:
    from jax_iser.replay import roofline

    check_writable("--json", args.json)
    make_folder("--plot", args.plot)
    devices = [_device(text) for text in args.device or []] or list(roofline.DEVICES)
    models = [_model(text) for text in args.model or []] or list(roofline.MODELS)
    rows = roofline.scenarios(devices, models, args.tokens_per_rank, args.copies, args.ep)
    times = roofline.layer_times(
        devices[0], models[0], args.tokens_per_rank[0], args.ep, args.slots
    )
    console = result_console(args)
    print_table(console, _scenario_table(rows))
    title = f"{models[0].name} on {devices[0].name}, {args.tokens_per_rank[0]:,} tokens/rank"
    print_table(console, _time_table(times, title))
    write_json(args.json, {"scenarios": [row._asdict() for row in rows], **times})
    if args.plot:
        from jax_iser.replay.figures import roofline_figure

        path = roofline_figure(rows, times, title, args.plot)
        progress_console().print(f"wrote {path}", markup=False)
    return 0


def _fields(text, option, form, counts, kinds):
    parts = text.split(":")
    if len(parts) not in counts or not parts[0]:
        wanted = " or ".join(map(str, counts))
        raise UsageError(f"{option} {text!r}: found {len(parts)} fields, expected {wanted}: {form}")
    try:
        values = [kind(part) for kind, part in zip(kinds, parts[1:], strict=False)]
    except ValueError as error:
        raise UsageError(f"{option} {text!r}: {error}") from None
    if not all(value == 0 or 1e-6 <= value <= 1e9 for value in values):
        raise UsageError(f"{option} {text!r} holds a number that is not 0 and outside 1e-6 to 1e9")
    return parts[0], values


def _device(text):
    from jax_iser.replay.roofline import Device

    name, (pflops, gbps, weight) = _fields(text, "--device", _DEVICE, (4,), (float,) * 3)
    if not pflops or not gbps:
        raise UsageError(f"--device {text!r}: rates are above 0")
    return Device(name, pflops * 1e15, gbps * 1e9, weight)


def _model(text):
    from jax_iser.replay.roofline import Model

    name, values = _fields(text, "--model", _MODEL, (6, 7), (int,) * 6)
    if not all(values[:3]):
        raise UsageError(f"--model {text!r}: width, intermediate size and top-k are above 0")
    return Model(name, *values)


def _scenario_table(rows):
    title = "FLOP per communicated byte; * below the device's line: copies do not hide"
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for name in ("device", "model", "tokens/rank", "copies", "routed only", "with shared", "line"):
        left = name in ("device", "model")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    routed = [row for row in rows if not row.shared]
    shared = {row[:4]: row for row in rows if row.shared}
    for row in routed:
        both = (row, shared[row[:4]])
        ratios = map(_ratio, both)
        head = (row.device, row.model, f"{row.tokens_per_rank:,}", str(row.copies))
        table.add_row(*head, *ratios, f"{row.line:,.0f}")
    return table


def _ratio(scenario):
    if not math.isfinite(scenario.ratio):
        return "no traffic"
    return f"{scenario.ratio:,.0f}{'' if scenario.above else ' *'}"


_LABELS = {
    "copy_mb": ("one expert", "MB", 2),
    "routed_us": ("routed experts", "us", 1),
    "token_traffic_us": ("dispatch + combine", "us", 1),
    "copy_us": ("one copy", "us", 1),
    "shared_us": ("shared expert", "us", 1),
    "copies_that_fit": ("copies that fit beside the routed experts", "", 2),
    "overrun_four_us": ("four copies outlast them by", "us", 1),
    "bf16_combine_us": ("combine alone in BF16", "us", 0),
    "helper_banks_mb": ("helper slots, two shared banks", "MB", 0),
    "helper_per_layer_gb": ("helper slots, one bank a layer", "GB", 2),
}


def _time_table(times, title):
    table = Table(title=title, show_header=False, box=box.SIMPLE_HEAD)
    for justify in ("left", "right"):
        table.add_column(justify=justify, no_wrap=True)
    for key, (label, unit, digits) in _LABELS.items():
        table.add_row(label, f"{times[key]:,.{digits}f} {unit}")
    return table
