"""The processes of a Domain: their memory, mapped in each other, and what they tell each other.

Memory is an anonymous memfd: nothing has a name on the file system, so nothing is left behind when
a process is killed. Descriptors travel over the sockets that `meeting` connects.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import struct
import weakref

import jax
import numpy as np

from jax_iser._extension import iser
from jax_iser.domain.meeting import FD, LEAVE, Meeting, receive_exactly
from jax_iser.errors import IserError

_all_members: weakref.WeakSet[Members] = weakref.WeakSet()
_PEER_DIED, _TIMEOUT = 2, 1  # codes of IserError
_WORDS = {FD: "called Domain.place", LEAVE: "closed the Domain"}


@dataclasses.dataclass(eq=False)
class Members:
    """The processes of a Domain as this one sees them.

    Attributes:
      specs: per process (memfd, first rank, number of ranks, socket to it or -1).
      local: index of this process in `specs`.
      meeting: of these processes, until the Domain is made.
    """

    specs: list[tuple[int, int, int, int]]
    local: int
    meeting: Meeting | None = None
    sockets: list[socket.socket] = dataclasses.field(default_factory=list)
    fds: list[int] = dataclasses.field(default_factory=list)
    placed: list[np.ndarray] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        _all_members.add(self)

    def wait_made(self, limit_s: float) -> None:
        """Waits until every process has made the Domain; nothing to do in a single one."""
        if len(self.specs) > 1:
            assert self.meeting is not None
            self.meeting.wait_made(self._peers(), limit_s)
        self.meeting = None

    def _peers(self) -> list[socket.socket | None]:
        """A socket to each process, by `specs` index; None for this one."""
        by_fd = {sock.fileno(): sock for sock in self.sockets}
        return [by_fd.get(alive) for _, _, _, alive in self.specs]

    def part(self, timeout_s: float) -> IserError | None:
        """Waits until every process closes the Domain; who did not, or None."""
        for sock in self.sockets:
            with contextlib.suppress(OSError):
                sock.sendall(LEAVE)
        for index, peer in enumerate(self._peers()):
            if peer is None:
                continue
            peer.settimeout(timeout_s)
            try:
                word = peer.recv(1)
            except TimeoutError:
                what = f"did not close its Domain within {timeout_s:g} s while this one did"
                return self._failure(index, what, _TIMEOUT, "closing")
            except OSError:
                word = b""
            if word == FD:
                return self._disagreement(index, FD, LEAVE)
            if word != LEAVE:
                return self._failure(
                    index, "is gone while this one closed the Domain", _PEER_DIED, "closing"
                )
        return None

    def _failure(self, index, what, code, stage) -> IserError:
        _, first_rank, _, _ = self.specs[index]
        return IserError(
            f"IserError: the process of rank {first_rank} {what}",
            code=code,
            rank=self.specs[self.local][1],
            peer=first_rank,
            stage=stage,
        )

    def _disagreement(self, index, theirs, ours) -> IserError:
        what = (
            f"{_WORDS.get(theirs, 'did something else')} while this one {_WORDS[ours]}; both must "
            "be done by all processes of a Domain, in the same order"
        )
        return self._failure(index, what, 0, "placing")

    def close(self) -> None:
        """Closes descriptors and sockets; mappings are closed by the Domain."""
        for sock in self.sockets:
            sock.close()
        for fd in self.fds:
            os.close(fd)
        self.sockets, self.fds, self.placed = [], [], []

    def exchange_fds(self, fd: int, note: dict) -> list[tuple[int, dict]]:
        """Sends a descriptor with a note to every other process; theirs, by `specs` index.

        Raises:
          IserError: a process is gone, or does something else.
        """
        peers = self._peers()
        with contextlib.suppress(OSError):  # whoever hung up is met below
            for peer in filter(None, peers):
                _send_fd(peer, fd, note)
        return [
            (fd, note) if peer is None else self._receive_fd(index, peer)
            for index, peer in enumerate(peers)
        ]

    def _receive_fd(self, index, peer):
        try:
            return _receive_fd(peer)
        except _OtherMessageError as other:
            raise self._disagreement(index, other.word, FD) from None
        except ConnectionError as error:
            if self.meeting is not None:
                raise self.meeting.gone(index) from error
            what = "is gone while this one called Domain.place"
            raise self._failure(index, what, _PEER_DIED, "placing") from error
        except TimeoutError as error:
            limit_s = peer.gettimeout()
            if self.meeting is not None:
                raise self.meeting.late([index], limit_s) from error
            what = f"did not call Domain.place within {limit_s:g} s, as this one did"
            raise self._failure(index, what, _TIMEOUT, "placing") from error

    def place(
        self, domain_id: int, array: np.ndarray | jax.Array, sharding, serial: int
    ) -> jax.Array:
        """One array in shared memory of each process; see `Domain.place`."""
        pieces = _local_pieces(array, sharding)
        local = list(pieces.values())
        starts = np.cumsum([0] + [_round_up(piece.nbytes) for piece in local])
        fd = _memfd(int(max(starts[-1], 1)))
        memory = iser.placed_bytes(fd, int(max(starts[-1], 1)))
        # Peers find it by its address here, which nothing else may take while they look.
        self.placed.append(memory)
        address = memory.ctypes.data
        notes = self.exchange_fds(fd, {"address": address, "bytes": memory.nbytes, "n": serial})
        for (peer_fd, note), (_, first_rank, _, _) in zip(notes, self.specs, strict=True):
            if note["n"] != serial:
                raise RuntimeError(
                    f"this process places array {serial} of the Domain, that of rank {first_rank} "
                    f"array {note['n']}: call Domain.place in the same order on all processes"
                )
            iser.add_placed(domain_id, peer_fd, first_rank, note["address"], note["bytes"])
        for peer_fd, _ in notes:
            os.close(peer_fd)
        arrays = []
        for device, piece, start in zip(pieces, local, starts, strict=False):
            view = memory[start : start + piece.nbytes].view(piece.dtype).reshape(piece.shape)
            view[...] = piece
            arrays.append(_as_jax_array(view, device))
        return jax.make_array_from_single_device_arrays(array.shape, sharding, arrays)


def is_spread(array) -> bool:
    """Whether the array is a `jax.Array` of which this process has a part only."""
    return isinstance(array, jax.Array) and not (
        array.is_fully_addressable or array.is_fully_replicated
    )


def _local_pieces(array, sharding) -> dict[jax.Device, np.ndarray]:
    """What this process's devices get of an array."""
    if is_spread(array):
        return {
            shard.device: np.ascontiguousarray(shard.data) for shard in array.addressable_shards
        }
    pieces, whole = sharding.addressable_devices_indices_map(array.shape), np.asarray(array)
    return {device: np.ascontiguousarray(whole[index]) for device, index in pieces.items()}


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


def connect(devices, ranks_per_device, segment_bytes, config, meeting: Meeting) -> Members:
    """Makes this process's memory and maps in that of the others.

    Args:
      devices: the axis's devices in rank order; those of a process are consecutive.
      ranks_per_device: ranks on each.
      segment_bytes: function from a number of ranks to the bytes of their segment.
      config: compared across processes.
      meeting: of the devices' processes.

    Raises:
      ValueError: devices of a process are not consecutive, processes are on several hosts, or have
        different configurations.
      IserError: a process failed, is gone or did not come.
    """
    owners = [device.process_index for device in devices]
    processes = meeting.processes
    spans = [
        (owners.index(p) * ranks_per_device, owners.count(p) * ranks_per_device) for p in processes
    ]
    if owners != [p for p in processes for _ in range(owners.count(p))]:
        raise ValueError(
            f"devices along the axis belong to processes {owners}; order the mesh so that each "
            "process's devices are consecutive"
        )
    local = meeting.local
    if meeting.is_alone:
        fd = _memfd(segment_bytes(spans[local][1]))
        return Members([(fd, *spans[local], -1)], local, fds=[fd])
    sockets = meeting.meet(config.digest, config.startup_limit_s(True))
    members = Members([], local, meeting, sockets=[sock for sock in sockets if sock is not None])
    try:
        fd = _memfd(segment_bytes(spans[local][1]))
        members.fds.append(fd)
        members.specs = [
            (fd, *span, -1 if sock is None else sock.fileno())
            for span, sock in zip(spans, sockets, strict=True)
        ]
        _swap_memory(members, fd)
    except BaseException as error:
        meeting.tell(error)  # before the sockets close, so that peers learn why
        members.close()
        raise
    return members


def _swap_memory(members, fd):
    """Replaces the descriptors in `members.specs` by those of each process's memory."""
    for index, (peer_fd, note) in enumerate(members.exchange_fds(fd, {"from": members.local})):
        if index == members.local:
            continue
        members.fds.append(peer_fd)
        if note["from"] != index:
            raise RuntimeError(f"process {note['from']} answered in place of {index}")
        members.specs[index] = (peer_fd, *members.specs[index][1:])


class _OtherMessageError(ConnectionError):
    """Something came in place of a descriptor."""

    def __init__(self, word: bytes):
        super().__init__(f"message {word!r} came in place of a descriptor")
        self.word = word


_HEAD = struct.Struct("<cI")  # FD, bytes of the note


def _send_fd(sock, fd: int, note: dict) -> None:
    text = json.dumps(note).encode()
    socket.send_fds(sock, [_HEAD.pack(FD, len(text))], [fd])
    sock.sendall(text)


def _receive_fd(sock) -> tuple[int, dict]:
    head, fds, _, _ = socket.recv_fds(sock, _HEAD.size, 1)
    for fd in fds:
        os.set_inheritable(fd, False)
    if head and head[:1] != FD:
        raise _OtherMessageError(head[:1])
    if len(head) != _HEAD.size or len(fds) != 1:
        raise ConnectionError("a peer hung up while sending its memory")
    return fds[0], json.loads(receive_exactly(sock, _HEAD.unpack(head)[1]))


def _leave_in_child():
    """A forked child holds copies of the sockets, which would hide the death of its parent."""
    for members in list(_all_members):
        members.close()


os.register_at_fork(after_in_child=_leave_in_child)
