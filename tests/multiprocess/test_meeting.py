"""How processes meet: strangers are hung up on, and processes that differ are told."""

import concurrent.futures
import pathlib
import secrets
import socket
import sys

import pytest
from processes import finish, start_processes

from jax_iser import _bootstrap

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
    with concurrent.futures.ThreadPoolExecutor() as pool:
        accepted, index = pool.submit(_bootstrap._accept, None, listener, TOKEN, 30.0).result(60)
    assert index == 2
    accepted.sendall(b"hello")
    assert peer.recv(5) == b"hello"
    assert guess.recv(1) == b""  # hung up
    for sock in (accepted, guess, peer):
        sock.close()


def test_a_peer_that_never_comes(listener):
    listener.settimeout(0.2)
    with pytest.raises(TimeoutError):
        _bootstrap._accept(None, listener, TOKEN, 0.2)


PROGRAM = """
import sys
import jax
from layers import make_domain, make_problem
from processes import join

index, _ = join(sys.argv)
try:
    make_domain(make_problem("W2"), num_layers=1 + index)
except ValueError as error:
    print(error)
"""


def test_processes_with_different_sizes_are_both_told(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    for index, (code, out, err) in enumerate(finish(start_processes(program, 2, 4), 90)):
        assert code == 0, err[-3000:]
        assert f"process {1 - index} made its Domain with other sizes or knobs" in out
        assert "pass the same to all" in out


def test_interpreter_has_what_meeting_needs():
    assert hasattr(socket, "send_fds"), sys.version
    assert pathlib.Path("/proc/sys/kernel/random/boot_id").exists()
