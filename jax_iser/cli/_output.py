"""What commands share: errors with an exit code, number arguments, tables, JSON."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


class UsageError(Exception):
    """Bad usage: exit code 2. The text is one line that names the value and the remedy."""


class Failure(Exception):  # noqa: N818
    """The command could not do its work: exit code 1. The text is one line."""


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """`--json FILE|-`."""
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write the result as JSON; '-': standard output, with all else on standard error",
    )


def result_console(args: argparse.Namespace) -> Console:
    """Where tables go: standard output, or standard error when that carries JSON."""
    return _console(stderr=args.json == "-")


def progress_console() -> Console:
    """Where progress and remarks go: standard error, always."""
    return _console(stderr=True)


def _console(stderr: bool) -> Console:
    # No markup: names of files and policies are printed, and may hold brackets.
    return Console(stderr=stderr, highlight=False, soft_wrap=True, markup=False, emoji=False)


def print_table(console: Console, table: Table) -> None:
    """Prints a table as wide as it needs, because a cut name or figure is none."""
    console.width = max(console.width, 10_000)  # to measure by; it is fitted below
    width = Measurement.get(console, console.options, table).maximum
    console.width = max(width, 1)
    console.print(table)


def write_json(target: str | None, value) -> None:
    """Writes `value` where `--json` says; what is not finite has no JSON and becomes null."""
    if target is None:
        return
    text = json.dumps(_finite(value), indent=2, allow_nan=False) + "\n"
    if target == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        Path(target).write_text(text)


def _finite(value):
    """The value with None in place of NaN and infinities."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_writable(option: str, target: str | None) -> None:
    """Raises UsageError now, not after minutes of work, where a file cannot be written."""
    if target is None or target == "-":
        return
    path = Path(target)
    if path.is_dir():
        raise UsageError(f"{option} {target} is a directory; name a file")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {target}: the directory {path.parent} does not exist")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{option} {target} cannot be written here")


def number(kind: type, low: float, high: float | None = None) -> Callable[[str], float]:
    """An argparse type: an int or a float from `low` to `high`."""

    def parse(text: str):
        try:
            value = kind(text)
        except ValueError:
            name = "an integer" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {name}") from None
        if not value >= low:
            raise argparse.ArgumentTypeError(f"{text} is below {low}")
        if high is not None and value > high:
            raise argparse.ArgumentTypeError(f"{text} is above {high}")
        return value

    return parse


def make_table(*columns: str) -> Table:
    """A plain table of right-justified columns."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def or_dash(value, form: str) -> str:
    """A value in a table; a dash where there is none."""
    return "-" if value is None else form.format(value)


def bar(value: float, longest: float, width: int = 40, mark: str = "█") -> str:
    """A bar of at most `width` characters, as long beside `longest` as `value`."""
    return mark * round(width * value / longest) if longest > 0 else ""
