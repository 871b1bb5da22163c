"""Runs the plain C++ tests under the sanitizers.

    python3 scripts/sanitize.py                  # ASan with UBSan, then TSan: every test
    python3 scripts/sanitize.py --only thread test_haloq

The tests are those groups of targets.bzl that name sanitizers. Before any of them counts, each
sanitizer has to catch the faults planted in tests/cpp/planted. Standard library only; CXX names the
compiler (default c++).
"""

import argparse
import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys
import time
from typing import NamedTuple

import targets

ROOT = targets.ROOT
BUILD = ROOT / "build" / "sanitize"
PLANTED = "tests/cpp/planted"
FLAGS = ["-std=c++17", "-O2", "-g", "-fno-omit-frame-pointer", "-pthread", "-I.", *targets.COPTS]


class Sanitizer(NamedTuple):
    """Compiler flags, and the planted faults with the words that must report them."""

    flags: list[str]
    planted: dict[str, str]


SANITIZERS = {
    "address": Sanitizer(
        ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
        {"heap_overflow": "heap-buffer-overflow", "signed_overflow": "signed integer overflow"},
    ),
    "thread": Sanitizer(["-fsanitize=thread"], {"data_race": "data race"}),
}


def compile_object(source: str, kind: str, copts: list[str]) -> pathlib.Path:
    """One object file; raises with the compiler's words."""
    target = BUILD / kind / f"{source}.o"
    target.parent.mkdir(parents=True, exist_ok=True)
    flags = [*FLAGS, *targets.isa_copts(source), *copts, *SANITIZERS[kind].flags]
    run_compiler([*flags, "-c", source, "-o", str(target)])
    return target


def run_compiler(arguments: list[str]) -> None:
    command = [os.environ.get("CXX", "c++"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


def link(program: str, objects: list[pathlib.Path], kind: str) -> pathlib.Path:
    target = BUILD / kind / program
    run_compiler([*FLAGS, *SANITIZERS[kind].flags, *map(str, objects), "-o", str(target)])
    return target


class Builder:
    """Programs of one sanitizer; the libraries' objects are compiled once."""

    def __init__(self, kind: str, pool: concurrent.futures.Executor) -> None:
        self._kind = kind
        self._pool = pool
        self._objects: dict[str, concurrent.futures.Future[pathlib.Path]] = {}

    def _object(self, source: str) -> concurrent.futures.Future[pathlib.Path]:
        if source not in self._objects:
            self._objects[source] = self._pool.submit(compile_object, source, self._kind, [])
        return self._objects[source]

    def build(self, program: targets.Program, deps: list[str]) -> pathlib.Path:
        own = [
            self._pool.submit(compile_object, source, self._kind, program.copts)
            for source in program.sources
        ]
        library = [self._object(source) for source in targets.host_sources(deps)]
        return link(program.name, [each.result() for each in [*own, *library]], self._kind)


def execute(program: pathlib.Path, args: list[str]) -> tuple[int, str]:
    """Exit code and output. Without address randomisation, which some TSan runtimes cannot take."""
    command = [str(program), *args]
    fixed = ["setarch", "-R"]
    if (
        shutil.which("setarch")
        and subprocess.run([*fixed, "true"], capture_output=True).returncode == 0
    ):
        command = [*fixed, *command]
    options = {"UBSAN_OPTIONS": "print_stacktrace=1", "TSAN_OPTIONS": "halt_on_error=1"}
    done = subprocess.run(
        command, env={**os.environ, **options}, capture_output=True, text=True, timeout=600
    )
    return done.returncode, done.stdout + done.stderr


def check_planted(kind: str, builder: Builder) -> None:
    """Stops where the sanitizer misses a fault that is there."""
    for name, words in SANITIZERS[kind].planted.items():
        program = targets.Program(name, [f"{PLANTED}/{name}.cc"], [], [])
        code, output = execute(builder.build(program, []), [])
        if code == 0 or words not in output:
            sys.exit(
                f"the {kind} sanitizer missed the planted {name}: exit code {code}, expected "
                f"{words!r} in its output, which was:\n{output}"
            )
        print(f"{kind}: caught the planted {name}", flush=True)


def programs(kind: str | None) -> dict[str, tuple[targets.Program, list[str]]]:
    """Name -> program and the libraries it needs, of one sanitizer or of all."""
    return {
        program.name: (program, values["deps"])
        for group, values in targets.PROGRAMS.items()
        if values.get("sanitizers") and (kind is None or kind in values["sanitizers"])
        for program in targets.programs(group)
    }


def run_tests(kind: str, names: list[str], builder: Builder) -> list[str]:
    """Names of the tests that failed."""
    failed = []
    for name, (program, deps) in sorted(programs(kind).items()):
        if names and name not in names:
            continue
        start = time.monotonic()
        code, output = execute(builder.build(program, deps), program.args)
        if code:
            failed.append(f"{name} ({kind})")
            print(output)
        word = f"failed with exit code {code}" if code else "passed"
        print(f"{kind}: {name} {word}, {time.monotonic() - start:.0f} s", flush=True)
    return failed


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=list(SANITIZERS), help="one of the two sanitizers")
    parser.add_argument("names", nargs="*", help="tests to run (default: all)")
    arguments = parser.parse_args()
    known = programs(None)
    if unknown := set(arguments.names) - set(known):
        sys.exit(
            f"no such test: {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}"
        )
    failed = []
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for kind in [arguments.only] if arguments.only else list(SANITIZERS):
            builder = Builder(kind, pool)
            check_planted(kind, builder)
            failed += run_tests(kind, arguments.names, builder)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
