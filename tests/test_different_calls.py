"""Ranks of one Domain that make different calls at once are all told, whatever differs."""

import pathlib

from different_calls_program import CASES
from processes import finish, start_processes

PROGRAM = pathlib.Path(__file__).resolve().parent / "different_calls_program.py"


def test_processes_in_different_calls_are_both_told():
    for code, out, err in finish(start_processes(PROGRAM, 2, 2), 150):
        assert code == 0, err[-3000:]
        told = dict(line.split(": ", 1) for line in out.splitlines())
        assert list(told) == list(CASES)
        assert told.pop("alike") == "fine"
        for case, text in told.items():
            assert "brings other sizes or options" in text, f"{case}: {text}"
            assert text.endswith("(closed with code 3)"), f"{case}: {text}"
            assert "make the same calls in the same order" in text, f"{case}: {text}"
