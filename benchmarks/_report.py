"""What every benchmark shares: medians of interleaved runs, and a JSON that says where it ran."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path


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


def _commit() -> str | None:
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def environment() -> dict:
    """Command, date, machine, versions and commit of this run."""
    packages = ("jax", "jaxlib", "flax", "numpy", "scipy")
    return {
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in packages},
        "commit": _commit(),
    }


def write(args, figures: dict) -> None:
    """Writes the figures where `--json` says, with the environment they were taken in."""
    if not args.json:
        return
    text = json.dumps({**environment(), **figures}, indent=2) + "\n"
    if args.json == "-":
        sys.stdout.write(text)
    else:
        Path(args.json).write_text(text)


def say(*lines) -> None:
    """Prints for people: on standard error, so that `--json -` stays JSON."""
    print(*lines, file=sys.stderr, flush=True)
