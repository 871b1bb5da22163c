"""What one process sees when the other is killed, or makes another call."""

import contextlib
import os
import pathlib
import signal
import threading

import pytest
from processes import start_processes

HERE = pathlib.Path(__file__).resolve().parent
LIMIT_S = 90


def names_left() -> set[str]:
    """Names in the places where shared memory and sockets leave some."""
    folders = [pathlib.Path("/dev/shm"), pathlib.Path("/tmp")]
    return {
        str(path) for folder in folders if folder.exists() for path in folder.iterdir()
        if "iser" in path.name or path.name.startswith(("sem.", "psm_", "memfd"))
    }  # fmt: skip


@pytest.fixture
def peers():
    """Two processes after a common first call; killed at the end and at the time limit."""
    processes = start_processes(HERE / "peer_program.py", 2, 4)
    timer = threading.Timer(LIMIT_S, lambda: [process.kill() for process in processes])
    timer.start()
    try:
        for process in processes:
            if read(process) != "ready":
                pytest.fail(process.communicate()[1][-3000:])
        yield processes
    finally:
        timer.cancel()
        for process in processes:
            process.kill()
            process.communicate()


def read(process) -> str:
    return process.stdout.readline().strip()


def tell(process, word):
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(f"{word}\n")
        process.stdin.flush()


def ask(process, word) -> tuple[float, str]:
    """Sends a word; seconds and text of the answer."""
    tell(process, word)
    line = read(process)
    assert line, process.communicate()[1][-3000:]
    seconds, text = line.split(" ", 1)
    return float(seconds), text


def test_calls_go_on_in_both(peers):
    for process in peers:
        tell(process, "call")
    assert [read(process).split(" ", 1)[1] for process in peers] == ["fine", "fine"]


def test_a_killed_process_fails_the_call_of_the_other(peers):
    before = names_left()
    survivor, victim = peers
    tell(survivor, "call")  # waits for the victim, which makes no call
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait(timeout=10)
    seconds, text = read(survivor).split(" ", 1)
    assert "IserError: rank " in text
    assert "lost the process of rank 4" in text, text
    assert float(seconds) < 5
    seconds, text = ask(survivor, "call")
    assert "lost the process of rank 4" in text
    assert seconds < 1
    assert "IserError: IserError: rank" in ask(survivor, "check")[1]
    assert ask(survivor, "renew")[1] == "fine"
    assert names_left() <= before


def test_a_process_killed_between_calls_fails_the_next(peers):
    survivor, victim = peers
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait(timeout=10)
    seconds, text = ask(survivor, "call")
    assert "lost the process of rank 4" in text
    assert seconds < 5
    seconds, text = ask(survivor, "close")
    assert "lost the process of rank 4" in text
    assert seconds < 5


def test_closing_after_a_peer_was_killed_is_no_hang(peers):
    survivor, victim = peers
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait(timeout=10)
    seconds, text = ask(survivor, "close")
    assert "IserError: IserError: the process of rank 4 is gone" in text
    assert seconds < 5


def test_a_child_of_a_killed_process_does_not_hide_its_death(peers):
    survivor, victim = peers
    child = int(ask(victim, "fork")[1])
    try:
        os.kill(victim.pid, signal.SIGKILL)
        victim.wait(timeout=10)
        seconds, text = ask(survivor, "call")
        assert "lost the process of rank 4" in text
        assert seconds < 5
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_call_that_a_closing_process_does_not_make_is_told_to_both(peers):
    tell(peers[0], "close")
    seconds, text = ask(peers[1], "call")
    words = (
        "is in a call that rank 0 does not make, because its process is closing the Domain in "
        "layer 0, stage counts, generation 3; all ranks must make the same calls"
    )
    assert words in text
    assert seconds < 5
    assert words in ask(peers[1], "close")[1]
    seconds, text = read(peers[0]).split(" ", 1)
    assert text.startswith("IserError: ")
    assert words in text


def test_processes_in_different_layers_are_both_told(peers):
    tell(peers[0], "call")
    tell(peers[1], "call1")
    for process in peers:
        text = read(process)
        assert "IserError: rank " in text
        assert "make the same calls in the same order" in text
        assert "fine" not in text
