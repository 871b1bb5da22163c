"""How the processes of a Domain find each other, and learn at once that one of them cannot come.

Each process posts a card in the key-value store of jax.distributed: the address of an abstract Unix
socket, a one-time token, its host and its configuration. Every two of them then connect. Who fails
posts a notice, and who dies hangs up, so that nobody waits for either until the time limit.

Names in the store carry the set of processes and how often that very set has met, so that groups
of processes that make Domains of their own do not disturb each other's.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import socket
import struct
import threading
import time

import jax

from jax_iser._jax_compat import key_value_client
from jax_iser.errors import IserError

MAKING = "making"  # the stage of errors of this module
_TIMEOUT, _PEER_DIED = 1, 2  # codes of IserError
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.2
_HELLO_BYTES = 40  # token and index
_lock = threading.Lock()
_num_met: dict[tuple[int, ...], int] = {}  # by the set of processes


class Meeting:
    """One attempt of the processes that own some devices to make a Domain; a context manager.

    Leaving it with an error tells the other processes.

    Args:
      devices: of the Domain, in rank order.
      ranks_per_device: ranks on each.

    Attributes:
      processes: their numbers in the order of their first ranks.
      local: index of this process in `processes`.

    Raises:
      ValueError: this process has none of the devices.
    """

    def __init__(self, devices, ranks_per_device: int):
        self._owners = [device.process_index for device in devices]
        self._ranks_per_device = ranks_per_device
        self.processes = sorted(set(self._owners), key=self._owners.index)
        me = jax.process_index()
        if me not in self.processes:
            raise ValueError(
                f"process {me} has no device on the mesh; only its members make a Domain"
            )
        self.local = self.processes.index(me)
        self._notice: dict | None = None  # a failure that is another process's
        self._has_told = False
        if self.is_alone:
            return
        members = tuple(sorted(self.processes))
        with _lock:
            serial = _num_met[members] = _num_met.get(members, -1) + 1
        self._tag = f"jax_iser/{'-'.join(map(str, members))}/{serial}"

    @property
    def is_alone(self) -> bool:
        """Whether all devices are of this process."""
        return len(self.processes) == 1

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if error is not None:
            self.tell(error)

    def tell(self, error: BaseException) -> None:
        """Posts why the Domain cannot be made; only the first reason counts."""
        if self.is_alone or self._has_told:
            return
        self._has_told = True
        text = " ".join(f"{type(error).__name__}: {error}".split())
        notice = self._notice or {"index": self.local, "text": f"failed: {text}"}
        with contextlib.suppress(RuntimeError):  # the store may be what failed
            key_value_client().key_value_set(f"{self._tag}/failed/{self.local}", json.dumps(notice))

    def name(self, index: int) -> str:
        """A process with its ranks, as errors name it."""
        process = self.processes[index]
        first = self.first_rank(index)
        last = first + self._owners.count(process) * self._ranks_per_device - 1
        ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
        return f"process {process} ({ranks})"

    def first_rank(self, index: int) -> int:
        """The lowest rank of a process."""
        return self._owners.index(self.processes[index]) * self._ranks_per_device

    def meet(self, digest: int, limit_s: float) -> list[socket.socket | None]:
        """Connects to every other process.

        Args:
          digest: of the configuration, compared across processes.
          limit_s: how long the others may take to come.

        Returns:
          A socket to each, by index in `processes`; None for this one.

        Raises:
          ValueError: a process is on another host or has another configuration.
          PermissionError: a process runs as another user.
          IserError: a process failed, is gone or did not come.
        """
        with contextlib.ExitStack() as undo:
            listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listener.bind(f"\0jax_iser-{secrets.token_hex(16)}")
            listener.listen(len(self.processes))
            card = {
                "host": host_id(),
                "name": listener.getsockname()[1:].decode(),
                "token": secrets.token_hex(16),
                "config": digest,
            }
            key_value_client().key_value_set(f"{self._tag}/card/{self.local}", json.dumps(card))
            sockets: list[socket.socket | None] = [None] * len(self.processes)
            try:
                self._connect_all(listener, card, sockets, limit_s)
            except BaseException as error:
                self.tell(error)  # before the sockets close, so that peers learn why
                for sock in filter(None, sockets):
                    sock.close()
                raise
            return sockets

    def _connect_all(self, listener, card, sockets, limit_s):
        deadline, pause_s = time.monotonic() + limit_s, _FIRST_PAUSE_S
        others = [index for index in range(len(self.processes)) if index != self.local]
        while missing := [index for index in others if sockets[index] is None]:
            entries = self._read()
            self._compare(card, entries)
            self._raise_noticed(entries)
            for index in missing:
                if index < self.local and f"card/{index}" in entries:
                    sockets[index] = self._call(index, entries[f"card/{index}"], limit_s)
            self._raise_gone(sockets)
            if time.monotonic() > deadline:
                raise self.late(missing, limit_s)
            if select.select([listener], [], [], pause_s)[0]:
                self._accept(listener, card["token"], sockets, limit_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _read(self) -> dict:
        """What the processes have posted, by the end of its name."""
        entries = key_value_client().key_value_dir_get(f"{self._tag}/")
        return {key.rsplit(f"{self._tag}/", 1)[1]: json.loads(value) for key, value in entries}

    def _compare(self, card, entries):
        for index, process in enumerate(self.processes):
            other = entries.get(f"card/{index}", card)
            me = self.processes[self.local]
            if other["host"] != card["host"]:
                raise ValueError(
                    f"process {process} is on another host than process {me}; a Domain spans the "
                    "processes of one host: make one Domain per host, or use "
                    'method="portable"'
                )
            if other["config"] != card["config"]:
                raise ValueError(
                    f"process {process} made its Domain with other sizes or knobs than process "
                    f"{me}; pass the same to all"
                )

    def _raise_noticed(self, entries):
        """Raises what another process said of a failure, its own or one that it saw."""
        notices = [value for key, value in sorted(entries.items()) if key.startswith("failed/")]
        if notices:
            self._notice = notices[0]
            raise self._lost(self._notice)

    def _raise_gone(self, sockets):
        for index, sock in enumerate(sockets):
            if sock is not None and has_hung_up(sock):
                raise self.gone(index)

    def _lost(self, notice) -> IserError:
        who, text = self.name(notice["index"]), notice["text"]
        return IserError(
            f"IserError: {who} {text} (while the Domain was being made); see to that process, then "
            "make the Domain again on all of them",
            code=notice.get("code", _PEER_DIED),
            rank=self.first_rank(self.local),
            peer=self.first_rank(notice["index"]),
            stage=MAKING,
        )

    def gone(self, index: int) -> IserError:
        """Why a process hung up, as far as it or others have said."""
        with contextlib.suppress(RuntimeError):
            try:
                self._raise_noticed(self._read())
            except IserError as noticed:
                return noticed
        self._notice = {"index": index, "text": "is gone"}
        return self._lost(self._notice)

    def late(self, missing: list[int], limit_s: float) -> IserError:
        """What to raise for processes that did not come, or not further, within the limit."""
        names = ", ".join(self.name(index) for index in missing)
        text = f"did not make the Domain within {limit_s:g} s"
        self._notice = {"index": missing[0], "text": text, "code": _TIMEOUT}
        return IserError(
            f"IserError: {names} {text}; every process of the mesh makes the Domain: look there, "
            "or raise startup_timeout_s",
            code=_TIMEOUT,
            rank=self.first_rank(self.local),
            peer=self.first_rank(missing[0]),
            stage=MAKING,
        )

    def _call(self, index, card, limit_s) -> socket.socket | None:
        """Connects to an earlier process and says which one this is; None to try again."""
        with contextlib.ExitStack() as undo:
            sock = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            sock.settimeout(limit_s)
            try:
                sock.connect(f"\0{card['name']}")
                check_same_user(sock)
                sock.sendall(f"{card['token']}{self.local:08d}".encode())
            except BlockingIOError:  # too many callers at once
                return None
            except ConnectionError as error:
                raise self.gone(index) from error
            undo.pop_all()
        return sock

    def _accept(self, listener, token, sockets, limit_s):
        """The connection that waits, if it knows the token; strangers are hung up on."""
        sock, index = accept(listener, token, limit_s)
        if sock is not None:
            sockets[index] = sock

    def wait_made(self, sockets, limit_s: float) -> None:
        """Waits until the Domain is made in every process.

        Raises:
          IserError: a process failed, is gone or did not finish.
        """
        for sock in filter(None, sockets):
            with contextlib.suppress(OSError):  # whoever hung up is met below
                sock.sendall(MADE)
        deadline = time.monotonic() + limit_s
        for index, sock in enumerate(sockets):
            if sock is None:
                continue
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                word = sock.recv(1)
            except TimeoutError:
                raise self.late([index], limit_s) from None
            except OSError:
                word = b""
            sock.settimeout(limit_s)
            if word != MADE:
                raise self.gone(index)
        key_value_client().key_value_delete(f"{self._tag}/card/{self.local}")


MADE, FD, LEAVE = b"m", b"f", b"x"  # what a message on a socket is


def host_id() -> str:
    """Tells hosts apart: processes share memory within one boot of one kernel."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def has_hung_up(sock) -> bool:
    """Whether the other end is closed, whatever it has sent before."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))


def accept(listener, token, limit_s) -> tuple[socket.socket | None, int]:
    """The next connection and the index it gives; (None, -1) for one that does not know the token.

    Raises:
      TimeoutError: nobody comes within the listener's limit.
    """
    sock, _ = listener.accept()
    sock.settimeout(min(limit_s, 10.0))
    try:
        check_same_user(sock)
        words = receive_exactly(sock, _HELLO_BYTES)
    except OSError:  # of another user, silent, or gone
        words = b""
    if secrets.compare_digest(words[:32], token.encode()):
        sock.settimeout(limit_s)
        return sock, int(words[32:])
    sock.close()
    return None, -1


def check_same_user(sock) -> None:
    """Raises PermissionError where the process at the other end is of another user."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if uid != os.geteuid():
        raise PermissionError(
            f"a process of the mesh runs as user {uid}, this one as user {os.geteuid()}; a Domain "
            "shares memory between processes of one user: start all of them as the same"
        )


def receive_exactly(sock, size: int) -> bytes:
    """So many bytes; ConnectionError where the other end closes before."""
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise ConnectionError("a peer hung up in the middle of a message")
        data += piece
    return data
