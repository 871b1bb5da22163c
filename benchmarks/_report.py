"""What every benchmark shares: medians of interleaved runs, and a JSON that says where it ran.

    python3 benchmarks/_report.py OUT.json --command WORDS [--note WORDS]... [GROUP=]FILE.jsonl...

makes one document of GPU benchmarks that print a JSON object a line: where and when they ran, then
their rows by GROUP, or by each row's "bench".

    python3 benchmarks/_report.py --check

prints the commit that a run started now would record, or says why there is none.
"""

from __future__ import annotations

import argparse
import datetime
import functools
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
# Without these a figure cannot be traced to what was run.
REQUIRED = ("command", "date", "device", "versions", "commit")
_ROOT = Path(__file__).resolve().parent.parent
_GPU_PACKAGES = ("jax-cuda13-plugin", "torch", "triton", "tokamax", "nvidia-cublas")


class Parser(argparse.ArgumentParser):
    """Arguments of a benchmark; one that is to write figures fails before it runs, not after."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.add_argument("--json", metavar="FILE", help="write the figures here; - for stdout")
        self.add_argument(
            "--allow-dirty",
            action="store_true",
            help="record a commit marked -dirty where the sources differ from it",
        )

    def parse_known_args(self, *args, **options):
        parsed, others = super().parse_known_args(*args, **options)
        if parsed.json:
            try:
                check_commit(source_commit(), parsed.allow_dirty)
            except ValueError as error:
                self.error(str(error))
        return parsed, others


def parser(description: str) -> Parser:
    """Arguments of every benchmark; `--json -` writes to standard output."""
    result = Parser(description=description)
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


@functools.cache
def source_commit() -> str | None:
    """The commit of the sources when this program first asked, `-dirty` if they differ from it.

    `ISER_COMMIT` stands in where the sources lie without their history. Results and pages may
    differ: a run writes the former, and neither changes what is measured.
    """
    if given := os.environ.get("ISER_COMMIT"):
        return given
    commit = _output("git", "-C", str(_ROOT), "rev-parse", "--short=10", "HEAD")
    tracked = ("status", "--porcelain", "--untracked-files=no", "--", ".")
    changed = _output("git", "-C", str(_ROOT), *tracked, ":!benchmarks/results", ":!docs")
    if commit is None or changed is None:
        return None
    return f"{commit}-dirty" if changed else commit


def check_commit(commit: str | None, allow_dirty: bool = False) -> str:
    """The commit, if figures may be recorded with it.

    Raises:
        ValueError: there is none, it is no commit, or it is dirty and may not be.
    """
    if commit is None:
        raise ValueError(
            f"{_ROOT} is no git checkout, so the figures would have no commit; set ISER_COMMIT to "
            "the commit that the sources were taken from"
        )
    if not re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", commit):
        raise ValueError(f"ISER_COMMIT={commit!r} is no commit; give its 7 to 40 hex digits")
    if commit.endswith("-dirty") and not allow_dirty:
        raise ValueError(
            f"the sources are {commit}: they differ from commit {commit.removesuffix('-dirty')}, "
            "so nobody could run the same; commit them first, or pass --allow-dirty to record the "
            "figures so marked"
        )
    return commit


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
    cpu, cores = _cpu_model(), len(os.sched_getaffinity(0))
    return {
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu,
        "cores": cores,
        "device": f"{cpu}, {cores} cores",
        **gpus,
        "python": platform.python_version(),
        "versions": versions,
        "commit": source_commit(),
    }


def checked(document: dict) -> dict:
    """The document, if it says how its figures came about.

    Raises:
        ValueError: naming what is missing.
    """
    if missing := [key for key in REQUIRED if not document.get(key)]:
        raise ValueError(f"a result without {', '.join(missing)}: it needs {', '.join(REQUIRED)}")
    return document


def write(args, figures: dict, *, row_a_line: bool = False) -> None:
    """Writes the figures where `--json` says, with the environment they were taken in."""
    if not args.json:
        return
    document = {**checked(environment()), **figures}
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
    lines = argparse.ArgumentParser(description="One JSON document of GPU benchmarks' lines.")
    lines.add_argument("out", metavar="OUT.json", nargs="?")
    lines.add_argument("--check", action="store_true", help="print the commit and write nothing")
    lines.add_argument("--allow-dirty", action="store_true", help="take a commit marked -dirty")
    lines.add_argument("--command", help="what was run")
    lines.add_argument("--note", action="append", default=[], help="what a reader must know")
    lines.add_argument("files", nargs="*", metavar="[GROUP=]FILE.jsonl")
    args = lines.parse_intermixed_args()
    try:
        commit = check_commit(source_commit(), args.allow_dirty)
        if args.check:
            print(commit)
            return
        if not (args.out and args.command and args.files):
            raise ValueError("OUT.json, --command and a FILE.jsonl are needed")
        if not _gpus():
            raise ValueError("nvidia-smi shows no GPU: a GPU's figures are recorded on its machine")
        document = checked(environment() | {"command": args.command})
    except ValueError as error:
        lines.error(str(error))
    document = {key: value for key, value in document.items() if value is not None}
    Path(args.out).write_text(
        to_text(document | {"notes": args.note} | group_rows(args.files)), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
