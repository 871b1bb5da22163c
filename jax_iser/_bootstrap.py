"""How the processes of a Domain find each other and map each other's memory.

Memory is an anonymous memfd: nothing has a name on the file system, so nothing is left behind when
a process is killed. Descriptors travel over an abstract Unix socket whose address goes through
jax.distributed's key-value store together with a one-time token; both ends check the token and
that the peer runs as the same user.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import secrets
import socket
import struct

import jax
import numpy as np

from jax_iser import _iser
from jax_iser._ffi import key_value_client

_made = itertools.count()  # Domains made by this process: the same on all of them


@dataclasses.dataclass
class Members:
    """The processes of a Domain as this one sees them.

    Attributes:
      specs: per process (memfd, first rank, number of ranks, socket to it or -1).
      local: index of this process in `specs`.
    """

    specs: list[tuple[int, int, int, int]]
    local: int
    tag: str = ""
    sockets: list[socket.socket] = dataclasses.field(default_factory=list)
    fds: list[int] = dataclasses.field(default_factory=list)
    placed: list[np.ndarray] = dataclasses.field(default_factory=list)

    def barrier(self, name: str, timeout_s: float) -> None:
        """Waits until every process is here; nothing to do in a single one."""
        if len(self.specs) > 1:
            self._client().wait_at_barrier(f"{self.tag}/{name}", int(timeout_s * 1000))

    def _client(self):
        return key_value_client()

    def part(self, timeout_s: float) -> tuple[int, str] | None:
        """Waits until every process leaves; None, or (its first rank, what became of it)."""
        for sock in self.sockets:
            with contextlib.suppress(OSError):
                sock.sendall(b"x")
        for _, first_rank, _, alive in self.specs:
            for sock in self.sockets:
                if sock.fileno() != alive:
                    continue
                sock.settimeout(timeout_s)
                try:
                    if not sock.recv(1):
                        return first_rank, "is gone"
                except TimeoutError:
                    return first_rank, f"did not close its Domain within {timeout_s:g} s"
                except OSError:
                    return first_rank, "is gone"
        return None

    def close(self) -> None:
        """Closes descriptors and sockets; mappings are closed by the Domain."""
        for sock in self.sockets:
            sock.close()
        for fd in self.fds:
            os.close(fd)
        self.sockets, self.fds, self.placed = [], [], []

    def exchange_fds(self, fd: int, note: dict) -> list[tuple[int, dict]]:
        """Sends a descriptor with a note to every other process; theirs, by `specs` index."""
        by_fd = {sock.fileno(): sock for sock in self.sockets}
        peers = [by_fd.get(alive) for _, _, _, alive in self.specs]  # None for this process
        for peer in filter(None, peers):
            _send_fd(peer, fd, note)
        return [(fd, note) if peer is None else _receive_fd(peer) for peer in peers]

    def place(self, domain_id: int, array: np.ndarray, sharding, serial: int) -> jax.Array:
        """One array in shared memory of each process; see `Domain.place`."""
        pieces = sharding.addressable_devices_indices_map(array.shape)
        local = [np.ascontiguousarray(array[index]) for index in pieces.values()]
        starts = np.cumsum([0] + [_round_up(piece.nbytes) for piece in local])
        fd = _memfd(int(max(starts[-1], 1)))
        memory = _iser.placed_bytes(fd, int(max(starts[-1], 1)))
        # Peers find it by its address here, which nothing else may take while they look.
        self.placed.append(memory)
        address = memory.ctypes.data
        notes = self.exchange_fds(fd, {"address": address, "bytes": memory.nbytes, "n": serial})
        for (peer_fd, note), (_, first_rank, _, _) in zip(notes, self.specs, strict=True):
            if note["n"] != serial:
                raise RuntimeError("processes called Domain.place in different orders")
            _iser.add_placed(domain_id, peer_fd, first_rank, note["address"], note["bytes"])
        for peer_fd, _ in notes:
            os.close(peer_fd)
        arrays = []
        for device, piece, start in zip(pieces, local, starts, strict=False):
            view = memory[start : start + piece.nbytes].view(piece.dtype).reshape(piece.shape)
            view[...] = piece
            arrays.append(_as_jax_array(view, device))
        return jax.make_array_from_single_device_arrays(array.shape, sharding, arrays)


def _round_up(size: int, to: int = 128) -> int:
    return -(-size // to) * to


def _as_jax_array(view: np.ndarray, device) -> jax.Array:
    """A JAX array over the view's memory, on `device`, without a copy."""
    array = jax.device_put(view, device, may_alias=True)
    if array.unsafe_buffer_pointer() != view.ctypes.data:
        raise RuntimeError(
            "this jax copies where it was asked to alias; Domain.place needs aliasing"
        )
    return array


def _memfd(size: int) -> int:
    fd = os.memfd_create("jax_iser", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    return fd


def process_count(devices) -> int:
    """Processes that own the devices."""
    return len({device.process_index for device in devices})


def connect(devices, ranks_per_device, segment_bytes, config) -> Members:
    """Makes this process's memory and maps in that of the others.

    Args:
      devices: the axis's devices in rank order; those of a process are consecutive.
      ranks_per_device: ranks on each.
      segment_bytes: function from a number of ranks to the bytes of their segment.
      config: compared across processes.

    Raises:
      ValueError: devices of a process are not consecutive, processes are on several hosts, or have
        different configurations.
    """
    owners = [device.process_index for device in devices]
    processes = sorted(set(owners), key=owners.index)
    spans = [
        (owners.index(p) * ranks_per_device, owners.count(p) * ranks_per_device) for p in processes
    ]
    if owners != [p for p in processes for _ in range(owners.count(p))]:
        raise ValueError(
            f"devices along the axis belong to processes {owners}; order the mesh so that each "
            "process's devices are consecutive"
        )
    serial = next(_made)
    me = jax.process_index()
    if me not in processes:
        raise ValueError(f"process {me} has no device on the mesh; only its members make a Domain")
    fd = _memfd(segment_bytes(spans[processes.index(me)][1]))
    if len(processes) == 1:
        return Members([(fd, *spans[0], -1)], 0, fds=[fd])
    return _connect_processes(processes, spans, fd, serial, config)


def _connect_processes(processes, spans, fd, serial, config) -> Members:
    client, me = key_value_client(), jax.process_index()
    local = processes.index(me)
    tag = f"jax_iser/{serial}/{'-'.join(map(str, processes))}"
    limit_ms = int(config.startup_limit_s(True) * 1000)
    token = secrets.token_hex(16)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    name = f"\0jax_iser-{secrets.token_hex(16)}"
    listener.bind(name)
    listener.listen(len(processes))
    listener.settimeout(config.startup_limit_s(True))
    card = {"host": _host_id(), "name": name, "token": token, "config": config.digest}
    client.key_value_set(f"{tag}/{me}", json.dumps(card))
    cards = [json.loads(client.blocking_key_value_get(f"{tag}/{p}", limit_ms)) for p in processes]
    _compare_cards(cards, processes, local)
    members = Members([(fd, *span, -1) for span in spans], local, tag, fds=[fd])
    try:
        for index in range(len(processes)):
            if index != local:
                _meet(members, listener, cards, index, config.startup_limit_s(True))
    finally:
        listener.close()
    return members


def _host_id() -> str:
    """Tells hosts apart: processes share memory within one boot of one kernel."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def _compare_cards(cards, processes, local):
    for card, process in zip(cards, processes, strict=True):
        if card["host"] != cards[local]["host"]:
            raise ValueError(
                f"process {process} is on another host than process {processes[local]}; on CPUs a "
                "Domain spans one host"
            )
        if card["config"] != cards[local]["config"]:
            raise ValueError(
                f"process {process} made its Domain with other sizes or knobs than process "
                f"{processes[local]}; pass the same to all"
            )


def _meet(members, listener, cards, index, limit_s):
    """Connects to (as the later process) or accepts (as the earlier) one peer; swaps memory."""
    local = members.local
    if index < local:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(limit_s)
        sock.connect(cards[index]["name"])
        sock.sendall(f"{cards[index]['token']}{local:08d}".encode())
        peer = index
    else:
        sock, peer = _accept(members, listener, cards[local]["token"], limit_s)
    _check_same_user(sock)
    fd = members.specs[local][0]
    _send_fd(sock, fd, {"from": local})
    peer_fd, note = _receive_fd(sock)
    if note["from"] != peer:
        raise RuntimeError(f"process {note['from']} answered in place of {peer}")
    members.sockets.append(sock)
    members.fds.append(peer_fd)
    members.specs[peer] = (peer_fd, *members.specs[peer][1:3], sock.fileno())


def _accept(members, listener, token, limit_s):
    """The next connection that knows the token; strangers are hung up on."""
    while True:
        sock, _ = listener.accept()
        sock.settimeout(min(limit_s, 10.0))
        try:
            _check_same_user(sock)
            words = _receive_exactly(sock, 40)
        except OSError:  # of another user, silent, or gone
            words = b""
        if secrets.compare_digest(words[:32], token.encode()):
            sock.settimeout(limit_s)
            return sock, int(words[32:])
        sock.close()


def _check_same_user(sock):
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if uid != os.getuid():
        raise PermissionError(f"a peer runs as user {uid}, this process as {os.getuid()}")


def _receive_exactly(sock, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise ConnectionError("a peer hung up while the Domain was being made")
        data += piece
    return data


def _send_fd(sock, fd: int, note: dict) -> None:
    text = json.dumps(note).encode()
    socket.send_fds(sock, [struct.pack("I", len(text))], [fd])
    sock.sendall(text)


def _receive_fd(sock) -> tuple[int, dict]:
    head, fds, _, _ = socket.recv_fds(sock, 4, 1)
    if len(head) != 4 or len(fds) != 1:
        raise ConnectionError("a peer hung up while sending its memory")
    return fds[0], json.loads(_receive_exactly(sock, struct.unpack("I", head)[0]))
