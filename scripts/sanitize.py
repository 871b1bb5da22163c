"""Runs the plain C++ tests under the sanitizers.

    python3 scripts/sanitize.py                  # ASan with UBSan, then TSan: all of tests/cpp
    python3 scripts/sanitize.py --only thread haloq

tests/cpp/test_X.cc is linked with ffi/cpu/X*.cc, where there are any, or with what its first line
says after `// Links: `. Before any of them counts, each sanitizer has to catch the faults planted
in tests/cpp/planted. Standard library only; CXX names the compiler (default c++).
"""

import argparse
import concurrent.futures
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "sanitize"
TESTS = ROOT / "tests" / "cpp"
FLAGS = ["-std=c++17", "-O2", "-g", "-fno-omit-frame-pointer", "-ffp-contract=off", "-pthread"]
ISA_FLAGS = {
    "gemm_avx2.cc": ["-mavx2", "-mfma", "-mf16c"],
    "gemm_avx512.cc": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mfma"],
}


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


def compile_object(source: pathlib.Path, kind: str) -> pathlib.Path:
    """One object file; raises with the compiler's words."""
    target = BUILD / kind / f"{source.stem}.o"
    isa = ISA_FLAGS.get(source.name, []) if platform.machine() in ("x86_64", "AMD64") else []
    flags = [*FLAGS, *isa, *SANITIZERS[kind].flags, f"-I{ROOT}"]
    run_compiler([*flags, "-c", str(source), "-o", str(target)])
    return target


def run_compiler(arguments: list[str]) -> None:
    command = [os.environ.get("CXX", "c++"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


def sources_of(test: pathlib.Path) -> list[pathlib.Path]:
    """The test itself, and the sources that its first line or else its name names."""
    links = f"ffi/cpu/{test.stem.removeprefix('test_')}*.cc"
    with test.open() as file:
        first = file.readline()
    if first.startswith("// Links: "):
        links = first.removeprefix("// Links: ").strip()
    return [test, *sorted(ROOT.glob(links))]


def build(test: pathlib.Path, kind: str, pool: concurrent.futures.Executor) -> pathlib.Path:
    objects = pool.map(lambda source: compile_object(source, kind), sources_of(test))
    program = BUILD / kind / test.stem
    run_compiler([*FLAGS, *SANITIZERS[kind].flags, *map(str, objects), "-o", str(program)])
    return program


def execute(program: pathlib.Path) -> tuple[int, str]:
    """Exit code and output. Without address randomisation, which some TSan runtimes cannot take."""
    command = [str(program)]
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


def check_planted(kind: str, pool: concurrent.futures.Executor) -> None:
    """Stops where the sanitizer misses a fault that is there."""
    for name, words in SANITIZERS[kind].planted.items():
        program = build(TESTS / "planted" / f"{name}.cc", kind, pool)
        code, output = execute(program)
        if code == 0 or words not in output:
            sys.exit(
                f"the {kind} sanitizer missed the planted {name}: exit code {code}, expected "
                f"{words!r} in its output, which was:\n{output}"
            )
        print(f"{kind}: caught the planted {name}", flush=True)


def run_tests(kind: str, names: list[str], pool: concurrent.futures.Executor) -> list[str]:
    """Names of the tests that failed."""
    found = {path.stem.removeprefix("test_"): path for path in TESTS.glob("test_*.cc")}
    if unknown := set(names) - set(found):
        sys.exit(
            f"no such test: {', '.join(sorted(unknown))}; there are {', '.join(sorted(found))}"
        )
    failed = []
    for name in names or sorted(found):
        test = found[name]
        start = time.monotonic()
        code, output = execute(build(test, kind, pool))
        if code:
            failed.append(f"{test.stem} ({kind})")
            print(output)
        word = f"failed with exit code {code}" if code else "passed"
        print(f"{kind}: {test.stem} {word}, {time.monotonic() - start:.0f} s", flush=True)
    return failed


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=list(SANITIZERS), help="one of the two sanitizers")
    parser.add_argument("names", nargs="*", help="tests to run, without test_ (default: all)")
    arguments = parser.parse_args()
    failed = []
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for kind in [arguments.only] if arguments.only else list(SANITIZERS):
            (BUILD / kind).mkdir(parents=True, exist_ok=True)
            check_planted(kind, pool)
            failed += run_tests(kind, arguments.names, pool)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
