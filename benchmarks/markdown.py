"""Markdown tables and how figures are written in them."""

from __future__ import annotations

from collections.abc import Sequence


def markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table, figures to the right."""
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def percent(value: float | None, digits: int = 0, sign: str = "") -> str:
    return "-" if value is None else f"{100 * value:{sign}.{digits}f} %"


def span(values: Sequence[float], form: str = "") -> str:
    """`low to high`, or the one value that both are."""
    texts = (format(value, form) for value in (min(values), max(values)))
    low, high = (text.removeprefix("-") if float(text) == 0 else text for text in texts)
    return low if low == high else f"{low} to {high}"


def span_percent(values: Sequence[float], digits: int = 1, sign: str = "") -> str:
    """The same in percent."""
    return f"{span([100 * value for value in values], f'{sign}.{digits}f')} %"
