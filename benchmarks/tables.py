"""Writes the tables of README.md and docs/ from benchmarks/results: `make docs-tables`.

    python benchmarks/tables.py [--check]

A table stands in its page between `<!-- table: NAME -->` and `<!-- end -->`, with the command,
date, device and commit of its result below it, and whether what it measured has changed since.
`--check` writes nothing and names the tables that differ.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import cpu_tables
import gpu_tables
import replay_tables

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"<!-- table: (\S+) -->\n(.*?)<!-- end -->", re.DOTALL)
CHANGED = "What it measures has changed since, and it has not been run again."
UNCHANGED = "What it measures has not changed since."

GPU_LAYER = ("ffi/core", "ffi/cuda")
# What each result measures, besides the program that measures it.
MEASURED = {
    "prefill": ("ffi/core", "ffi/cpu", "ffi/bindings", "jax_iser", "models"),
    "planner_cpu": (
        "ffi/core",
        "jax_iser/methods/portable/plan.py",
        "jax_iser/reference/planner.py",
        "jax_iser/replay/eplb.py",
    ),
    "fused_moe_cpu": ("ffi/core", "ffi/cpu", "jax_iser/layer.py", "benchmarks/bench_fused_moe.py"),
    "gemm_cpu": ("ffi/cpu/gemm.h", "benchmarks/bench_gemm.py"),
    "replay": ("ffi/core", "jax_iser/replay"),
    "replay_speed": ("ffi/core", "ffi/cpu/replay.cc", "jax_iser/replay"),
    "cuda_plan": (*GPU_LAYER, "benchmarks/cuda/bench_plan.cu"),
    "cuda_replication": (*GPU_LAYER, "benchmarks/cuda/bench_replication.cu"),
    "cuda_fused_moe": (*GPU_LAYER, "benchmarks/cuda/bench_fused_moe.cu"),
    "cuda_products": (*GPU_LAYER, "benchmarks/cuda/bench_fused_moe.cu"),
    "cuda_epilogues": (*GPU_LAYER, "benchmarks/cuda/bench_fused_moe.cu"),
    "cuda_before_after": (*GPU_LAYER, "benchmarks/cuda/bench_fused_moe.cu"),
    "cuda_layer": (*GPU_LAYER, "jax_iser/layer.py", "benchmarks/cuda/bench_layer.py"),
    "cuda_baselines": (*GPU_LAYER, "jax_iser/layer.py", "benchmarks/cuda/bench_baselines.py"),
}


class Table(NamedTuple):
    """A block of a page: its text from one result."""

    page: str
    result: str
    text: Callable[[dict], str]


def _tables(page: str, of_result: dict[str, dict[str, Callable[[dict], str]]]) -> dict[str, Table]:
    return {
        name: Table(page, result, text)
        for result, texts in of_result.items()
        for name, text in texts.items()
    }


TABLES = (
    _tables("README.md", {"prefill": {"prefill": cpu_tables.prefill}})
    | _tables("docs/performance.md", cpu_tables.TABLES | gpu_tables.TABLES)
    | _tables("docs/replay.md", replay_tables.TABLES)
)


def load(result: str) -> dict:
    return json.loads((RESULTS / f"{result}.json").read_text())


def commits_of(document: dict) -> list[str]:
    """The commits that a document names; results joined from several runs name several."""
    return re.findall(r"\b[0-9a-f]{7,40}\b", document.get("commit") or "")


@functools.cache
def _git(*words: str) -> int:
    """Exit status of a git command here; 128 and more where there is no history to ask."""
    try:
        return subprocess.run(("git", "-C", str(ROOT), *words), capture_output=True).returncode
    except OSError:
        return 128


def has_changed(result: str, document: dict) -> bool | None:
    """Whether what the result measured differs from its commit; None without its history."""
    found = [
        _git("diff", "--quiet", commit, "--", *MEASURED[result]) for commit in commits_of(document)
    ]
    if any(status == 1 for status in found):
        return True
    return False if found and not any(found) else None


def source(result: str, document: dict, old: str) -> str:
    """Where a table's figures come from; `old` is the block, for what only history knows."""
    missing = "not recorded"
    said = {key: document.get(key) or f"{key} {missing}" for key in ("command", "date", "commit")}
    date = said["date"].split("T")[0]
    device = document.get("device") or document.get("cpu") or f"device {missing}"
    if "device" not in document and "cores" in document:
        device += f", {document['cores']} cores"
    commit = said["commit"]
    if "-dirty" in commit:
        commit += " (with uncommitted changes: nobody else can run the same)"
    changed = has_changed(result, document)
    if changed is None:
        changed = UNCHANGED not in old
    words = [f"`benchmarks/results/{result}.json`: {commit}, {date}", device]
    words += [f"{name} {version}" for name, version in document.get("versions", {}).items()]
    command = document.get("command")
    lines = [f"{', '.join(words)}.", f"Command: `{command}`." if command else f"{said['command']}."]
    lines += [f"Note: {note}." for note in document.get("notes", ())]
    return f"<sub>{' '.join([*lines, CHANGED if changed else UNCHANGED])}</sub>"


def block(name: str, old: str = "") -> str:
    """The text between a table's markers."""
    table = TABLES[name]
    document = load(table.result)
    return f"{table.text(document)}\n\n{source(table.result, document, old)}\n"


def written(page: str, text: str) -> str:
    """The page with its tables as their results give them.

    Raises:
        ValueError: a table has no place in its page, or a place no table.
    """
    names = [match[1] for match in BLOCK.finditer(text)]
    wanted = {name for name, table in TABLES.items() if table.page == page}
    if missing := wanted - set(names):
        raise ValueError(f"{page} has no place for {sorted(missing)}: <!-- table: NAME -->")
    if unknown := set(names) - wanted:
        raise ValueError(f"{page} has places for {sorted(unknown)}, which no result fills")

    def fill(match: re.Match) -> str:
        return f"<!-- table: {match[1]} -->\n{block(match[1], match[2])}<!-- end -->"

    return BLOCK.sub(fill, text)


def differing(page: str, text: str) -> list[str]:
    """Names of the page's tables that are not what their results give."""
    right = {match[1]: match[2] for match in BLOCK.finditer(written(page, text))}
    return [match[1] for match in BLOCK.finditer(text) if match[2] != right[match[1]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail on a difference")
    check = parser.parse_args().check
    stale = []
    for page in dict.fromkeys(table.page for table in TABLES.values()):
        text = (ROOT / page).read_text()
        stale += [f"{page}: {name}" for name in differing(page, text)]
        if not check:
            (ROOT / page).write_text(written(page, text))
    if check and stale:
        sys.exit("not what their results give: " + ", ".join(stale) + "; run make docs-tables")


if __name__ == "__main__":
    main()
