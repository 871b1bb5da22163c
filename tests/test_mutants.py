"""The table of planted faults matches the sources, and its runner tells killed from surviving."""

import importlib.util
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent


def load_runner():
    spec = importlib.util.spec_from_file_location("mutants_runner", ROOT / "scripts" / "mutants.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


runner = load_runner()
MUTANTS = runner.load()


def test_every_pattern_matches_and_every_test_is_there():
    assert len(MUTANTS) > 100
    assert not runner.check_all(MUTANTS, ROOT)


@pytest.mark.parametrize(
    "sources",
    [
        "ffi/core/",
        "ffi/cpu/",
        "jax_iser/reference/",
        "jax_iser/replay/policies/",
        "jax_iser/replay/traces/",
    ],
)
def test_the_table_covers(sources):
    changed = {path for mutant in MUTANTS for path in runner.changed_files(mutant, ROOT)}
    assert any(str(path.relative_to(ROOT)).startswith(sources) for path in changed)


SOURCE = '''
def largest(values):
    """The largest value, the first of equals."""
    best = 0
    for at, value in enumerate(values):
        if value > values[best]:
            best = at
    return best
'''
TESTS = """
from jax_iser.largest import largest

def test_largest():
    assert largest([3, 5, 4]) == 1
"""
TABLE = """
[largest]
tests = ["tests/**/test_largest.py"]

[[largest.mutant]]
name = "the least"
pattern = '''value > values'''
replace = 'value < values'

[[largest.mutant]]
name = "the last of equals"
pattern = '''if value > values\\[best\\]: best = at'''
replace = 'if value >= values[best]: best = at'

[[largest.mutant]]
name = "the first, judged"
pattern = '''best = at'''
replace = 'pass'
survives = "a claim that is wrong"
"""


@pytest.fixture
def project(tmp_path):
    """A tree of one function, its test and its table."""
    files = {
        "jax_iser/largest.py": SOURCE,
        "jax_iser/__init__.py": "",
        "tests/test_largest.py": TESTS,
        "tests/mutants/table.toml": TABLE,
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return runner.Tree(pathlib.Path(sys.executable), tmp_path)


def test_killed_and_surviving_mutants_are_told_apart(project, tmp_path):
    mutants = runner.load(tmp_path / "tests" / "mutants")
    assert not runner.check_all(mutants, tmp_path)
    runner.baselines(project, mutants)
    bad = runner.run(project, mutants, tmp_path / "results.json")
    assert bad == [
        "largest: the last of equals (survived)",
        "largest: the first, judged (killed against the table)",
    ]
    assert (tmp_path / "jax_iser" / "largest.py").read_text() == SOURCE


def test_a_test_without_an_end_is_killed(project, monkeypatch):
    monkeypatch.setattr(runner, "LIMIT_S", 0.1)
    assert project.run_tests(["tests/test_largest.py"])[0] == "hung"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("value > values", "value >> values"), "matches 0 times"),
        (("value > values", "at|best"), "the entry says 1"),
        (("value < values", "value > values"), "changes nothing"),
        (("test_largest.py", "test_smallest.py"), "no test file is"),
    ],
)
def test_entries_that_have_gone_stale_are_named(project, tmp_path, change, words):
    path = tmp_path / "tests" / "mutants" / "table.toml"
    path.write_text(TABLE.replace(*change, 1))
    wrong = runner.check_all(runner.load(path.parent), tmp_path)
    assert wrong
    assert words in wrong[0]


def test_entries_that_do_not_read_are_refused(tmp_path):
    path = tmp_path / "table.toml"
    for change, words in (
        (("replace =", "replacement ="), "unknown fields"),
        (('tests = ["tests/**/test_largest.py"]', ""), "names no tests"),
        (("the last of equals", "the least"), "stand twice"),
    ):
        path.write_text(TABLE.replace(*change, 1))
        with pytest.raises(ValueError, match=words):
            runner.load(tmp_path)


def test_tests_that_are_red_without_a_fault_stop_the_run(project, tmp_path):
    (tmp_path / "tests" / "test_largest.py").write_text(TESTS.replace("== 1", "== 2"))
    with pytest.raises(SystemExit, match="without a fault"):
        runner.baselines(project, runner.load(tmp_path / "tests" / "mutants"))
