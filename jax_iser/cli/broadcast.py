"""Models of broadcasting one expert to g devices: ring, scatter + all-gather, one port, SAMI.

Bandwidth is payload over time. One-port multicast is measured, at g = 4, 8 and 16, by the paper
(section 3.3); the others are models of the link bandwidth and a latency.

columns:
  ranks                 devices of the group, g
  ring                  a pipelined ring, slice by slice
  scatter + all-gather  in software: all ports send, the payload moves twice
  one port (measured)   multicast out of the owner's port
  SAMI                  members pull a share each and multicast it, in one pipeline
"""

from __future__ import annotations

import argparse

from rich import box
from rich.table import Table

from jax_iser.cli._output import (
    add_json_argument,
    check_writable,
    number,
    print_table,
    progress_console,
    result_console,
    write_json,
)
from jax_iser.cli._replay import folder, integers, make_folder

EXAMPLE = "jax-iser broadcast --groups 4,8,16 --link-gbps 450 --json -"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    groups = list(range(2, 17))
    parser.add_argument(
        "--groups",
        type=integers(2, 1024),
        default=groups,
        metavar="G,...",
        help="ranks of a group (default 2 to 16)",
    )
    parser.add_argument(
        "--expert-bytes",
        type=number(int, 1, 2**50),
        default=37_158_912,
        metavar="B",
        help="payload (default 37158912, a DeepSeek-V4-Pro expert in NVFP4)",
    )
    parser.add_argument(
        "--link-gbps",
        type=number(float, 1e-3, 1e6),
        default=900.0,
        metavar="GB/S",
        help="of a link, one direction (default 900)",
    )
    parser.add_argument(
        "--latency-us",
        type=number(float, 0, 1e6),
        default=5.0,
        metavar="US",
        help="of a step (default 5)",
    )
    parser.add_argument(
        "--slice-bytes",
        type=number(int, 1, 2**50),
        default=2 * 2**20,
        metavar="B",
        help="of the ring (default 2097152)",
    )
    add_json_argument(parser)
    parser.add_argument("--plot", type=folder, metavar="DIR", help="write the figure to a folder")


def run(args: argparse.Namespace) -> int:
    from jax_iser.replay.broadcast import Link, broadcast_rows

    check_writable("--json", args.json)
    make_folder("--plot", args.plot)
    link = Link(args.link_gbps * 1e9, args.latency_us * 1e-6, args.slice_bytes)
    rows = broadcast_rows(args.expert_bytes, args.groups, link)
    title = f"broadcast of {args.expert_bytes / 1e6:.2f} MB: GB/s, payload over time"
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for name in ("ranks", "ring", "scatter + all-gather", "one port (measured)", "SAMI"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        one_port = f"{row.one_port_gbps:.0f}" if row.one_port_gbps else "-"
        cells = (row.ring_gbps, row.scatter_all_gather_gbps)
        table.add_row(
            str(row.group_size), *(f"{v:.0f}" for v in cells), one_port, f"{row.sami_gbps:.0f}"
        )
    print_table(result_console(args), table)
    rows_json = [row._asdict() for row in rows]
    write_json(args.json, {"payload_mb": args.expert_bytes / 1e6, "rows": rows_json})
    if args.plot:
        from jax_iser.replay.figures import broadcast_figure

        path = broadcast_figure(rows, args.plot)
        progress_console().print(f"wrote {path}", markup=False)
    return 0
