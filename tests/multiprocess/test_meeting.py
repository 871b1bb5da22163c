"""How processes meet: strangers are hung up on, and every process learns why there is no Domain."""

import itertools
import json
import os
import pathlib
import re
import secrets
import socket
import sys

import pytest
from processes import finish, start_processes

from jax_iser.domain import meeting as _meeting

HERE = pathlib.Path(__file__).resolve().parent
TOKEN = secrets.token_hex(16)


@pytest.fixture
def listener():
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(f"\0jax_iser-test-{secrets.token_hex(8)}")
        sock.listen(8)
        sock.settimeout(30)
        yield sock


def connect(listener, words: bytes) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(30)
    sock.connect(listener.getsockname())
    sock.sendall(words)
    return sock


def test_only_the_token_opens(listener):
    connect(listener, b"").close()
    connect(listener, b"GET / HTTP/1.1").close()
    guess = connect(listener, f"{secrets.token_hex(16)}{3:08d}".encode())
    peer = connect(listener, f"{TOKEN}{2:08d}".encode())
    accepted = [_meeting.accept(listener, TOKEN, 30.0) for _ in range(4)]
    assert [index for _, index in accepted] == [-1, -1, -1, 2]
    sock = accepted[-1][0]
    sock.sendall(b"hello")
    assert peer.recv(5) == b"hello"
    assert guess.recv(1) == b""  # hung up
    for each in (sock, guess, peer):
        each.close()


def test_another_users_process_is_told_nothing(listener, monkeypatch):
    """The token goes to processes of this user alone; the error says who is who."""
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    meeting = object.__new__(_meeting.Meeting)
    meeting.local = 1
    card = {"name": listener.getsockname()[1:].decode(), "token": TOKEN}
    words = f"runs as user {uid}, this one as user {uid + 1}; .*start all of them as the same"
    with pytest.raises(PermissionError, match=words):
        meeting._call(0, card, 30.0)
    with listener.accept()[0] as sock:
        assert sock.recv(1) == b""
    peer = connect(listener, f"{TOKEN}{2:08d}".encode())
    assert _meeting.accept(listener, TOKEN, 30.0) == (None, -1)
    peer.close()


def test_a_peer_that_never_comes(listener):
    listener.settimeout(0.2)
    with pytest.raises(TimeoutError):
        _meeting.accept(listener, TOKEN, 0.2)


@pytest.fixture(scope="module")
def outcomes():
    """Per process, the lines of tests/multiprocess/meeting_program.py by step."""
    results = finish(start_processes(HERE / "meeting_program.py", 3, 1), 240)
    found = []
    for index, (code, out, err) in enumerate(results):
        assert code == (-9 if index == 1 else 0), f"process {index}:\n{out}\n{err[-4000:]}"
        found.append([json.loads(line) for line in out.splitlines() if line.startswith("{")])
    return found


def lines(outcomes, step, limit_s=20.0):
    """The step's line of each process; [] where it has none. None may have taken longer."""
    per_process = [[line for line in each if line["step"] == step] for each in outcomes]
    for line in itertools.chain(*per_process):
        assert line["seconds"] < limit_s, line
    return [[line["text"] for line in each] for each in per_process]


def test_processes_with_different_sizes_are_all_told(outcomes):
    for index, (text,) in enumerate(lines(outcomes, "sizes")):
        other = "[02]" if index == 1 else "1"
        words = f"process {other} made its Domain with other sizes or knobs than process {index}"
        assert re.search(words, text), text
        assert "pass the same to all" in text


def test_processes_on_different_hosts_are_all_told(outcomes):
    for index, (text,) in enumerate(lines(outcomes, "host")):
        other = "[02]" if index == 1 else "1"
        assert re.search(f"process {other} is on another host than process {index}", text), text
        assert 'method="portable"' in text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_processes_of_different_users_are_all_told(outcomes):
    for (text,) in lines(outcomes, "user"):
        assert "PermissionError" in text
        assert "runs as user" in text
        assert "start all of them as the same" in text


@pytest.mark.parametrize(
    ("step", "error", "words"),
    [
        ("options", "ValueError", "top_k=7"),
        ("words", "ZeroDivisionError", "division by zero"),
    ],
)
def test_what_one_process_fails_of_is_told_to_all(outcomes, step, error, words):
    for index, (text,) in enumerate(lines(outcomes, step)):
        assert words in text
        if index == 1:
            assert text.startswith(f"{error}: ")
        else:
            assert text.startswith(f"IserError: IserError: process 1 (rank 1) failed: {error}: ")
    assert lines(outcomes, "again") == [["fine"]] * 3


def test_groups_of_processes_make_domains_of_their_own(outcomes):
    assert lines(outcomes, "pair") == [["fine"] * 2, ["fine"] * 2, []]
    assert lines(outcomes, "alone") == [[], [], ["fine"] * 3]
    assert "top_k=7" in lines(outcomes, "alone, refused")[2][0]
    assert lines(outcomes, "together") == [["fine"]] * 3


def test_a_process_that_comes_too_late_is_named_to_all(outcomes):
    for (text,) in lines(outcomes, "late"):
        assert "process 2 (rank 2) did not make the Domain within 1 s" in text
    assert lines(outcomes, "after it") == [["fine"]] * 3


def test_a_process_that_is_killed_is_named_to_the_others(outcomes):
    first, killed, third = lines(outcomes, "killed", limit_s=5.0)
    assert not killed
    for (text,) in (first, third):
        assert "process 1 (rank 1) is gone (while the Domain was being made)" in text
    assert lines(outcomes, "those left") == [["fine"], [], ["fine"]]


def test_interpreter_has_what_meeting_needs():
    assert hasattr(socket, "send_fds"), sys.version
    assert pathlib.Path("/proc/sys/kernel/random/boot_id").exists()
