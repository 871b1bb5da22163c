"""What every benchmark shares: medians of interleaved runs, and a JSON that says where it ran.

    python3 benchmarks/_report.py OUT.json --command WORDS [--note WORDS]... [GROUP=]FILE.jsonl...

makes one document of benchmarks that print a JSON object a line: where and when they ran, then
their rows by GROUP, or by each row's "bench".
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "scipy")
_GPU_PACKAGES = ("jax-cuda13-plugin", "torch", "triton", "tokamax", "nvidia-cublas")


def parser(description: str) -> argparse.ArgumentParser:
    """Arguments of every benchmark; `--json -` writes to standard output."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--json", metavar="FILE", help="write the figures here; - for stdout")
    result.add_argument("--repeats", type=int, default=7, help="timed rounds (default: 7)")
    return result


def medians(cases: dict, repeats: int) -> dict[str, float]:
    """Median seconds of each callable; every round runs all of them, so that drift hits all."""
    for run in cases.values():
        run()
    times = {name: [] for name in cases}
    for _ in range(repeats):
        for name, run in cases.items():
            begin = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in times.items()}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _commit() -> str | None:
    """Of the sources; `ISER_COMMIT` where they are there without their history."""
    if given := os.environ.get("ISER_COMMIT"):
        return given
    return _output("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")


def _gpus() -> dict:
    """Names of the GPUs and the versions of what drives them; empty without a GPU."""
    rows = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    if not rows:
        return {}
    names, drivers = zip(*(row.rsplit(", ", 1) for row in rows.splitlines()), strict=True)
    versions = {"driver": drivers[0]}
    if found := re.search(r"release ([0-9.]+)", _output("nvcc", "--version") or ""):
        versions["cuda"] = found[1]
    device = f"{len(names)}x {names[0]}"
    packages = {name: _version(name) for name in _GPU_PACKAGES}
    versions |= {name: version for name, version in packages.items() if version}
    return {"device": device, "versions": versions}


def environment() -> dict:
    """Command, date, machine, versions and commit of this run."""
    gpus = _gpus()
    versions = {name: _version(name) for name in _PACKAGES} | gpus.pop("versions", {})
    return {
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        **gpus,
        "python": platform.python_version(),
        "versions": versions,
        "commit": _commit(),
    }


def write(args, figures: dict, *, row_a_line: bool = False) -> None:
    """Writes the figures where `--json` says, with the environment they were taken in."""
    if not args.json:
        return
    document = {**environment(), **figures}
    text = to_text(document) if row_a_line else json.dumps(document, indent=2) + "\n"
    if args.json == "-":
        sys.stdout.write(text)
    else:
        Path(args.json).write_text(text)


def say(*lines) -> None:
    """Prints for people: on standard error, so that `--json -` stays JSON."""
    print(*lines, file=sys.stderr, flush=True)


def read_lines(path: str) -> list[dict]:
    """The objects among a file's lines; others are what its run said beside them."""
    lines = Path(path).read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def group_rows(files: list[str]) -> dict[str, list[dict]]:
    """Rows of `[GROUP=]FILE`s by group, else by their "bench"; other objects are in "setup"."""
    groups: dict[str, list[dict]] = {}
    for given in files:
        group, _, path = given.rpartition("=")
        for row in read_lines(path):
            name = group or row.pop("bench", "setup")
            groups.setdefault(name, []).append(row)
    return groups


def to_text(document: dict) -> str:
    """The document, a row a line."""
    parts = []
    for key, value in document.items():
        text = json.dumps(value)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n" + ",\n".join(f"    {json.dumps(row)}" for row in value) + "\n  ]"
        parts.append(f"  {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    lines = argparse.ArgumentParser(description="One JSON document of benchmarks' lines.")
    lines.add_argument("out", metavar="OUT.json")
    lines.add_argument("--command", required=True, help="what was run")
    lines.add_argument("--note", action="append", default=[], help="what a reader must know")
    lines.add_argument("--set", action="append", default=[], metavar="KEY=JSON", help="overrides")
    lines.add_argument("files", nargs="+", metavar="[GROUP=]FILE.jsonl")
    args = lines.parse_args()
    document = environment() | {"command": args.command}
    for given in args.set:
        key, _, value = given.partition("=")
        document[key] = json.loads(value)
    document = {key: value for key, value in document.items() if value is not None}
    Path(args.out).write_text(
        to_text(document | {"notes": args.note} | group_rows(args.files)), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
