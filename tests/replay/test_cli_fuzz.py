"""Random command lines and damaged traces; `cli_fuzz.py` runs more of them for as long as asked."""

import cli_fuzz
import pytest


@pytest.mark.parametrize("start", range(0, 200, 50))
def test_random_command_lines_end_in_zero_or_one_line(start):
    for seed in range(start, start + 50):
        assert not (found := cli_fuzz.check(seed)), found


def test_the_fuzzer_sees_a_traceback(monkeypatch):
    """Each way to end badly is told, with the line that reproduces it."""

    def broken(argv):
        raise KeyError("x")

    for main, words in (
        (broken, "KeyError"),
        (lambda argv: 1, "exit code 1"),
        (lambda argv: 2, "not one line"),
    ):
        monkeypatch.setattr(cli_fuzz, "main", main)
        assert words in cli_fuzz.check(3)
        assert "cli_fuzz.check(3)" in cli_fuzz.check(3)
