"""Plants faults in a copy of the sources, one at a time: the tests named beside each must go red.

    python3 scripts/mutants.py                  # every mutant; build/mutants/results.json
    python3 scripts/mutants.py core 'per_slot'  # those of a group, or with a word in their name
    python3 scripts/mutants.py --python         # without those of C++, which build the extension
    python3 scripts/mutants.py --check          # only whether every pattern still matches

The table is tests/mutants/*.toml; docs/testing.md says how an entry reads. A mutant that no test
notices is a survivor: the run fails, unless the entry says under `survives` why it does not matter.
Standard library only; the tests run in .venv.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "mutants"
WORK = ROOT / "build" / "mutants"
PROGRAM = "program:"
LIMIT_S = 300  # of a test run; a mutant that makes tests hang is found out too
PYTHON_SOURCES = "jax_iser/**/*.py"
CPP_SOURCES = "ffi/**/*.*"


@dataclasses.dataclass(frozen=True)
class Edit:
    """One change of a mutant: every match of a pattern in the files of a glob.

    Attributes:
      pattern: a regular expression; a space matches any run of white space, newlines included.
      replacement: as of `re.sub`.
      files: the glob.
      count: how many matches there are, in all of its files together.
    """

    pattern: str
    replacement: str
    files: str
    count: int


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A planted fault.

    Attributes:
      group, name: the name says what is wrong with the code.
      edits: what is changed.
      tests: arguments of pytest, `*` in them expanded as globs; or one `program:NAME`, a C++
        program of targets.bzl. The run has to fail.
      survives: why nothing needs to notice it; empty where something must.
    """

    group: str
    name: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]
    survives: str


def load(folder: pathlib.Path = TABLE) -> list[Mutant]:
    """Every mutant of the table; raises ValueError on an entry that does not read."""
    mutants = []
    for path in sorted(folder.glob("*.toml")):
        for group, content in tomllib.loads(path.read_text()).items():
            entries = content.pop("mutant", [])
            unknown = set(content) - {"files", "tests"}
            if unknown or not entries:
                raise ValueError(f"{path.name}: group {group} has {unknown or 'no mutant'}")
            mutants += [_mutant(path, group, content, entry) for entry in entries]
    names = [mutant.name for mutant in mutants]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"names that stand twice: {sorted(twice)}")
    return mutants


def _mutant(path, group, defaults, entry) -> Mutant:
    known = {"name", "pattern", "replace", "files", "count", "also", "tests", "survives"}
    if unknown := set(entry) - known:
        raise ValueError(f"{path.name}: {entry.get('name')} has unknown fields {sorted(unknown)}")
    edits = []
    for edit in (entry, *entry.get("also", ())):
        files = edit.get("files", defaults.get("files", PYTHON_SOURCES))
        edits.append(Edit(edit["pattern"], edit["replace"], files, edit.get("count", 1)))
    tests = entry.get("tests", defaults.get("tests"))
    if not tests:
        raise ValueError(f"{path.name}: {entry['name']} names no tests")
    return Mutant(group, entry["name"], tuple(edits), tuple(tests), entry.get("survives", ""))


def _expression(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern.replace(" ", r"\s+"), re.MULTILINE)


def changed_files(mutant: Mutant, root: pathlib.Path) -> dict[pathlib.Path, str]:
    """The new text of each file that the mutant changes.

    Raises:
      ValueError: a pattern that does not match as often as the entry says.
    """
    texts: dict[pathlib.Path, str] = {}
    for edit in mutant.edits:
        expression, found = _expression(edit.pattern), []
        for path in sorted(root.glob(edit.files)):
            if path.suffix not in {".py", ".h", ".cc"} or not path.is_file():
                continue
            before = texts.get(path) or path.read_text()
            after, count = expression.subn(edit.replacement, before)
            if count:
                texts[path] = after
                found += [str(path.relative_to(root))] * count
                if after == before:
                    raise ValueError(f"{mutant.name}: the replacement changes nothing in {path}")
        if len(found) != edit.count:
            raise ValueError(
                f"{mutant.name}: the pattern {edit.pattern!r} matches {len(found)} times in "
                f"{edit.files} ({', '.join(found) or 'nowhere'}), the entry says {edit.count}; "
                "follow the code that it stood for"
            )
    return texts


def is_cpp(mutant: Mutant, root: pathlib.Path) -> bool:
    """Whether the extension has to be built anew."""
    return any(path.suffix != ".py" for path in changed_files(mutant, root))


def test_arguments(mutant: Mutant, root: pathlib.Path) -> list[str]:
    """The arguments of pytest, globs expanded; raises ValueError where one names nothing."""
    arguments = []
    for argument in mutant.tests:
        name, _, node = argument.partition("::")
        if "/" not in name:
            arguments.append(argument)
            continue
        paths = sorted(str(path.relative_to(root)) for path in root.glob(name))
        if "/gpu/" not in name:  # tests of the same names for GPUs: slower, and skipped elsewhere
            paths = [path for path in paths if "/gpu/" not in path]
        if not paths:
            raise ValueError(f"{mutant.name}: no test file is {name}")
        arguments += [f"{path}::{node}" if node else path for path in paths]
    return arguments


def program_of(arguments: Sequence[str]) -> str | None:
    """The C++ program that takes the place of pytest, if one does."""
    is_program = len(arguments) == 1 and arguments[0].startswith(PROGRAM)
    return arguments[0].removeprefix(PROGRAM) if is_program else None


class Tree:
    """A copy of the working tree to plant faults in, with an extension built in place.

    Args:
      python: the interpreter of the tests.
    """

    def __init__(self, python: pathlib.Path, root: pathlib.Path):
        self.root, self.python = root, python
        self.build = root.with_name("build")

    def copy(self) -> None:
        """Takes what git knows or would add; files that went are removed."""
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        names = {name for name in listed.stdout.split("\0") if (ROOT / name).is_file()}
        for path in self.root.rglob("*"):
            is_ours = path.suffix in {".py", ".h", ".cc", ".toml"} and not path.is_symlink()
            if is_ours and str(path.relative_to(self.root)) not in names:
                path.unlink()
        for name in names:
            source, target = ROOT / name, self.root / name
            # Times stay, so that only what changed is built again.
            if not target.exists() or target.read_bytes() != source.read_bytes():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)

    def compile(self, target: str = "_iser") -> None:
        """Builds the extension beside the copied sources, or a program; RuntimeError with words."""
        if not (self.build / "build.ninja").exists():
            launcher = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
            self._run(
                "cmake", "-S", self.root, "-B", self.build, "-GNinja",
                f"-DPython_EXECUTABLE={self.python}", *launcher,
            )  # fmt: skip
        self._run("cmake", "--build", self.build, "--target", target)

    def _run(self, *command) -> None:
        path = os.pathsep.join([str(self.python.parent), os.environ["PATH"]])
        done = subprocess.run(
            [str(part) for part in command],
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            words = (done.stdout + done.stderr)[-3000:]
            raise RuntimeError(f"{' '.join(map(str, command[:3]))} failed:\n{words}")

    def run_tests(self, arguments: list[str]) -> tuple[str, str]:
        """`passed`, `failed`, `hung` or `broken`, and what pytest or the program said last."""
        command = [str(self.python), "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        program = program_of(arguments)
        if program:
            self.compile(program)
            found = sorted(path for path in self.build.rglob(program) if path.is_file())
            command, arguments = [str(found[0])], []
        environment = {**os.environ, "PYTHONPATH": str(self.root), "CI": "true"}
        process = subprocess.Popen(
            [*command, *arguments],
            cwd=self.root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the programs that tests started too
            process.communicate()
            return "hung", f"after {LIMIT_S} s"
        lines = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
        last = (lines or output.splitlines()[-1:] or [""])[0][:200]
        # A process that a fault has crashed has failed too.
        names = {0: "passed", 1: "failed"}
        outcome = names.get(process.returncode, "failed" if process.returncode < 0 else "broken")
        return outcome, last if outcome != "broken" else output[-1500:]


def try_mutant(tree: Tree, mutant: Mutant) -> tuple[str, str]:
    """`killed`, `survived` or `broken`, and why; the tree's sources are as before afterwards."""
    changed = changed_files(mutant, tree.root)
    before = {path: path.read_text() for path in changed}
    try:
        for path, text in changed.items():
            path.write_text(text)
        arguments = test_arguments(mutant, tree.root)
        if any(path.suffix != ".py" for path in changed) and not program_of(arguments):
            tree.compile()
        outcome, words = tree.run_tests(arguments)
    except RuntimeError as error:
        return "broken", str(error)
    finally:
        for path, text in before.items():
            path.write_text(text)
    return {"passed": "survived", "broken": "broken"}.get(outcome, "killed"), words


def check_all(mutants: list[Mutant], root: pathlib.Path) -> list[str]:
    """What is wrong with the table, in words."""
    wrong = []
    for mutant in mutants:
        try:
            for path, text in changed_files(mutant, root).items():
                if path.suffix == ".py":
                    compile(text, str(path), "exec")
            test_arguments(mutant, root)
        except (ValueError, SyntaxError) as error:
            wrong.append(str(error))
    return wrong


def baselines(tree: Tree, mutants: list[Mutant]) -> None:
    """Stops where tests that are to go red are red without a fault."""
    for arguments in sorted({tuple(test_arguments(mutant, tree.root)) for mutant in mutants}):
        outcome, words = tree.run_tests(list(arguments))
        if outcome != "passed":
            sys.exit(f"without a fault {' '.join(arguments)} {outcome}: {words}")
        print(f"without a fault: passed {' '.join(arguments)}", flush=True)


def named(mutants: list[Mutant], words: list[str]) -> list[Mutant]:
    """Those of the groups that are named, and those whose name has one of the other words."""
    groups = {mutant.group for mutant in mutants} & set(words)
    parts = [word for word in words if word not in groups]
    return [
        mutant
        for mutant in mutants
        if not words or mutant.group in groups or any(part in mutant.name for part in parts)
    ]


def in_order(mutants: list[Mutant], root: pathlib.Path, python_only: bool) -> list[Mutant]:
    """C++ last, so that the extension is as it was till then; or left out."""
    of_cpp = [mutant for mutant in mutants if is_cpp(mutant, root)]
    of_python = [mutant for mutant in mutants if mutant not in of_cpp]
    return of_python if python_only else of_python + of_cpp


def judge(mutant: Mutant, outcome: str) -> str:
    """The outcome, told apart from what the table says of survivors."""
    if outcome == "survived" and mutant.survives:
        return "survives as judged"
    if outcome == "killed" and mutant.survives:
        return "killed against the table"
    return outcome


def run(tree: Tree, mutants: list[Mutant], results: pathlib.Path) -> list[str]:
    """Tries all; returns the names of those that need a person."""
    rows, bad = [], []
    for mutant in mutants:
        begin = time.monotonic()
        outcome, words = try_mutant(tree, mutant)
        verdict = judge(mutant, outcome)
        if verdict not in ("killed", "survives as judged"):
            bad.append(f"{mutant.group}: {mutant.name} ({verdict})")
        seconds = round(time.monotonic() - begin, 1)
        rows.append(
            {
                "group": mutant.group,
                "name": mutant.name,
                "verdict": verdict,
                "seconds": seconds,
                "words": words,
                "why": mutant.survives,
            }
        )
        print(f"{verdict:20} {seconds:6.1f} s  {mutant.group}: {mutant.name}", flush=True)
        if verdict == "broken":
            print(words, flush=True)
        results.write_text(json.dumps(rows, indent=1) + "\n")
    return bad


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="parts of groups or names (default: all)")
    parser.add_argument("--python", action="store_true", help="leave out those of C++")
    parser.add_argument("--work", type=pathlib.Path, default=WORK, help="where the copy is kept")
    parser.add_argument("--check", action="store_true", help="only match the patterns")
    parser.add_argument("--no-baseline", action="store_true", help="skip the runs without a fault")
    arguments = parser.parse_args()
    mutants = named(load(), arguments.words)
    if wrong := check_all(mutants, ROOT):
        sys.exit("\n".join(wrong))
    mutants = in_order(mutants, ROOT, arguments.python)
    if not mutants:
        sys.exit(f"no mutant's group is, and no name has, one of {arguments.words}")
    if arguments.check:
        print(f"{len(mutants)} mutants: every pattern matches")
        return
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    tree = Tree(ROOT / ".venv" / "bin" / "python", work / "tree")
    tree.copy()
    tree.compile()
    if not arguments.no_baseline:
        baselines(tree, mutants)
    bad = run(tree, mutants, work / "results.json")
    killed = len(mutants) - len(bad)
    print(f"{killed} of {len(mutants)} as they should be")
    if bad:
        sys.exit("\n".join(["to be judged:", *bad]))


if __name__ == "__main__":
    main()
