"""Symmetric memory of GPUs: what every rank's device, of this process or another, can address.

Memory of the driver's virtual memory management: physical memory of a device (cuMemCreate), mapped
at an address that all devices of this process may use, and exported to other processes as POSIX
file descriptors (which travel as `_bootstrap` sends them) or, where asked for and shown to work,
fabric handles. Nothing has a name on the file system, and physical memory lives until the last
process that maps it is gone.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from typing import Any

import jax

from jax_iser.domain.cuda.driver import CudaError, Devices, Driver, Undo, noted, undone_on_error
from jax_iser.domain.rendezvous import Members

POSIX_FD, FABRIC = "posix_fd", "fabric"
_HANDLE_TYPES = {
    POSIX_FD: "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR",
    FABRIC: "CU_MEM_HANDLE_TYPE_FABRIC",
}
_FABRIC_BYTES = 64
_XLA_FRACTION = 0.75  # of a GPU's memory: what XLA takes by default
_NO_FABRIC = "fabric handles need an IMEX channel (/dev/nvidia-caps-imex-channels) on each host"
_NO_ACCESS = (
    'use one of them with ranks_per_device, GPUs that NVLink connects, or method="portable"'
)


class OutOfCudaMemoryError(CudaError, MemoryError):
    """A device has less memory free than was asked for; the text has both and the settings."""


class Segment:
    """A piece of one device's memory, mapped for all devices of this process.

    Made by `SymmetricMemory`; released once by `close()`, after which nothing may use the address.

    Attributes:
      address: where it is mapped, for host code and kernels of this process.
      nbytes: bytes asked for.
      mapped_bytes: `nbytes`, rounded up to the driver's granularity.
      ordinal: the device whose memory it is, or -1 if another process exported it.
      owner: text naming that device.
    """

    def __init__(self, devices: Devices, handle_type: str, nbytes: int, ordinal: int, owner: str):
        self._devices, self._handle_type = devices, handle_type
        self.nbytes, self.ordinal, self.owner = nbytes, ordinal, owner
        self.address = self.mapped_bytes = 0
        self._handle: Any = None
        self._lock, self._resources = threading.Lock(), Undo()

    @classmethod
    def create(cls, devices: Devices, ordinal: int, nbytes: int, handle_type: str) -> Segment:
        """New memory of a device, filled with zeros.

        Raises:
          OutOfCudaMemoryError: the device has too little.
          CudaError: another call failed; nothing is left of the earlier ones.
        """
        segment = cls(devices, handle_type, nbytes, ordinal, devices.labels[ordinal])
        with undone_on_error() as undo:
            size = _round_up(nbytes, _granularity(devices, handle_type))
            segment._own(_create(devices, ordinal, size, handle_type), undo)
            segment._map(size, undo)
            devices.fill_zero(ordinal, segment.address, size)
            segment._keep(undo)
        return segment

    @classmethod
    def import_(cls, devices: Devices, fd: int, note: dict[str, Any]) -> Segment:
        """Memory that another process exported with `export()`; `fd` stays the caller's."""
        segment = cls(devices, note["handle_type"], note["nbytes"], -1, note["owner"])
        with undone_on_error() as undo:
            segment._own(_import(devices, fd, note), undo)
            segment._map(note["mapped_bytes"], undo)
            segment._keep(undo)
        return segment

    def _call(self, name, *arguments, on="", remedy=""):
        return self._devices.driver.call(name, *arguments, on=on or self.owner, remedy=remedy)

    def _own(self, handle, undo):
        self._handle = handle
        undo.add(self._call, "cuMemRelease", handle)

    def _map(self, size, undo):
        # Aligned as the driver's largest page that may lie there.
        alignment = _granularity(self._devices, self._handle_type)
        address = self._call("cuMemAddressReserve", size, alignment, 0, 0)
        undo.add(self._call, "cuMemAddressFree", address, size)
        self._call("cuMemMap", address, size, 0, self._handle, 0)
        undo.add(self._call, "cuMemUnmap", address, size)
        for ordinal in self._devices.ordinals:
            self._allow(ordinal, address, size)
        self.address, self.mapped_bytes = int(address), size

    def _allow(self, ordinal, address, size):
        driver = self._devices.driver.module
        access = driver.CUmemAccessDesc()
        access.location = _location(driver, ordinal)
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        label = self._devices.labels[ordinal]
        if ordinal == self.ordinal:
            self._call("cuMemSetAccess", address, size, [access], 1)
        else:
            on = f"{label} to memory of {self.owner}"
            self._call("cuMemSetAccess", address, size, [access], 1, on=on, remedy=_NO_ACCESS)

    def _keep(self, undo):
        """The last step: from now on `close()` undoes the others."""
        self._devices.retain()
        self._resources.add(self._devices.close)
        self._resources.add(undo.take().run)

    def export(self) -> tuple[int, dict[str, Any]]:
        """(descriptor, note) for `import_` in another process.

        The caller closes the descriptor. For fabric handles it is an empty file: the handle is in
        the note, and `_bootstrap` always sends a descriptor.
        """
        with self._lock:
            if not self.address:
                raise ValueError("this memory is closed")
            key = _handle_type_of(self._devices.driver.module, self._handle_type)
            exported = self._call("cuMemExportToShareableHandle", self._handle, key, 0)
        note = {
            "handle_type": self._handle_type,
            "nbytes": self.nbytes,
            "mapped_bytes": self.mapped_bytes,
            "address": self.address,
            "owner": f"{self.owner} of process {jax.process_index()}",
        }
        if self._handle_type == POSIX_FD:
            os.set_inheritable(int(exported), False)
            return int(exported), note
        note["fabric"] = bytes(exported.data)[:_FABRIC_BYTES].hex()
        return os.memfd_create("jax_iser", os.MFD_CLOEXEC), note

    def close(self) -> None:
        """Unmaps, gives back the addresses, releases the memory; a second time does nothing.

        Nothing on any device may use the memory any more. All steps are tried even if one fails.
        It may wait for kernels of all streams (cuMemUnmap is synchronous), as making memory may.
        """
        with self._lock:
            self.address = 0
            self._resources.run()


class SymmetricMemory:
    """Equal pieces of memory on devices of this process, and what other processes exported.

    Made by `allocate`. Use it as a context manager or call `close()`.

    Attributes:
      devices: the `Devices`.
      segments: a `Segment` a device, in the order of the ordinals.
      peers: segments of other processes, in the order of `import_peer` calls.
      handle_type: "posix_fd" or "fabric".
      reason: why that one, as text.
    """

    def __init__(self, devices: Devices, handle_type: str, reason: str):
        self.devices, self.handle_type, self.reason = devices, handle_type, reason
        self.segments: list[Segment] = []
        self.peers: list[Segment] = []
        self._resources = Undo()
        self._resources.add(devices.close)

    def _add(self, segment, to):
        self._resources.add(segment.close)
        to.append(segment)
        return segment

    def __enter__(self) -> SymmetricMemory:
        return self

    def __exit__(self, kind, error, traceback) -> None:
        with noted(error) if error is not None else contextlib.nullcontext():
            self.close()

    def import_peer(self, fd: int, note: dict[str, Any]) -> Segment:
        """Maps memory that another process exported, for all devices of this one.

        Args:
          fd: the descriptor as received; it stays the caller's to close.
          note: what `Segment.export` said of it.
        """
        return self._add(Segment.import_(self.devices, fd, note), self.peers)

    def read(self, address: int, nbytes: int) -> bytes:
        """Copies memory to the host, on a stream of its own: also while kernels run.

        Raises:
          ValueError: the range is not all in one segment.
        """
        return self.devices.read(self._ordinal_at(address, nbytes), address, nbytes)

    def write(self, address: int, data: bytes) -> None:
        """Copies bytes to memory, on a stream of its own: also while kernels run.

        Raises:
          ValueError: the range is not all in one segment.
        """
        self.devices.write(self._ordinal_at(address, len(data)), address, data)

    def _ordinal_at(self, address, nbytes):
        for segment in self.segments + self.peers:
            start = segment.address
            if start and start <= address and address + nbytes <= start + segment.mapped_bytes:
                return self.devices.ordinals[0] if segment.ordinal < 0 else segment.ordinal
        raise ValueError(f"{nbytes} bytes at {address:#x} are not in this memory, or it is closed")

    def close(self) -> None:
        """Releases everything; a second time does nothing."""
        self._resources.run()


def allocate(
    device_ordinals: Sequence[int] | Devices,
    bytes_per_device: int,
    *,
    fabric: bool = False,
    driver: Any = None,
) -> SymmetricMemory:
    """Memory on each of the devices, zeros, that all of them and other processes can map.

    Args:
      device_ordinals: CUDA ordinals, or `Devices` (of `Devices.of(jax_devices)`), which the memory
        closes.
      bytes_per_device: at least 1; rounded up to the driver's granularity, 2 MiB as a rule.
      fabric: use fabric handles if a trial of them works.
      driver: for tests, in place of `cuda.bindings.driver`.

    Raises:
      ImportError: cuda-python is not installed.
      OutOfCudaMemoryError: a device has too little memory.
      CudaError: another call failed, or two devices cannot access each other. Whatever fails,
        nothing stays allocated.
    """
    devices = device_ordinals
    if not isinstance(devices, Devices):
        devices = Devices(devices, driver)
    with undone_on_error() as undo:
        undo.add(devices.close)
        if bytes_per_device < 1:
            raise ValueError(f"bytes_per_device={bytes_per_device} is below 1")
        handle_type, reason = choose_handle_type(devices, fabric)
        memory = SymmetricMemory(devices, handle_type, reason)
        undo.take()  # the memory closes the devices now
        undo.add(memory.close)
        for ordinal in devices.ordinals:
            segment = Segment.create(devices, ordinal, bytes_per_device, handle_type)
            memory._add(segment, memory.segments)
    return memory


def exchange(
    memory: SymmetricMemory,
    members: Members,
    segments: Sequence[Segment],
    num_segments: Sequence[int],
    mark: int = 0,
) -> list[list[Segment]]:
    """Maps segments of all processes in each: every process of `members` calls it, at once.

    Args:
      memory: what closes the imported segments.
      segments: this process's, at least one.
      num_segments: how many each process passes, by index in `members.specs`.
      mark: the same on all processes, or they do different things.

    Returns:
      Per process the segments as mapped here, this process's its own.

    Raises:
      RuntimeError: another `mark`.
    """
    found: list[list[Segment]] = [[] for _ in num_segments]
    found[members.local] = list(segments)
    for turn in range(max(num_segments)):
        # Who has fewer sends its last again: a swap takes one of everyone.
        fd, note = segments[min(turn, len(segments) - 1)].export()
        with contextlib.ExitStack() as descriptors:
            descriptors.callback(os.close, fd)
            for process, (peer_fd, peer_note) in enumerate(
                members.exchange_fds(fd, {**note, "mark": mark})
            ):
                if process == members.local:
                    continue
                descriptors.callback(os.close, peer_fd)
                if peer_note["mark"] != mark:
                    raise RuntimeError(
                        f"process {process} shares memory {peer_note['mark']}, this one {mark}: "
                        "all processes have to exchange the same, in the same order"
                    )
                if turn < num_segments[process]:
                    found[process].append(memory.import_peer(peer_fd, peer_note))
    return found


def choose_handle_type(devices: Devices, fabric: bool) -> tuple[str, str]:
    """How memory is exported: (handle type, why).

    Raises:
      CudaError: a device can do neither.
    """
    reason = "fabric handles were not asked for"
    if fabric:
        try:
            _try_fabric(devices)
            return FABRIC, "a trial export and import of a fabric handle worked"
        except CudaError as error:
            reason = f"fabric handles do not work: {error}"
    for ordinal in devices.ordinals:
        _require(devices, ordinal, "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED")
        _require(devices, ordinal, "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")
    return POSIX_FD, reason


def probe(driver: Any = None) -> dict[str, Any]:
    """What `jax-iser doctor` tells of the GPUs: nothing stays allocated.

    Returns:
      `devices`: a list of `Driver.describe()` with `free` and `total` bytes; `handle_type` and
      `reason`: as `choose_handle_type(fabric=True)`.

    Raises:
      ImportError, CudaError: as `allocate`.
    """
    driver = Driver(driver)
    devices = Devices(range(driver.call("cuDeviceGetCount")), driver)
    with contextlib.closing(devices):
        infos = []
        for ordinal in devices.ordinals:
            free, total = devices.memory_info(ordinal)
            infos.append({**devices.infos[ordinal], "free": free, "total": total})
        handle_type, reason = choose_handle_type(devices, True)
    return {"devices": infos, "handle_type": handle_type, "reason": reason}


def _require(devices, ordinal, attribute):
    device = devices.driver.call("cuDeviceGet", ordinal)
    if not devices.driver.attribute(device, attribute):
        raise CudaError(
            f"{devices.labels[ordinal]} says CU_DEVICE_ATTRIBUTE_{attribute} is 0, so that its "
            'memory cannot be shared; use another GPU or method="portable"',
            "cuDeviceGetAttribute",
        )


def _try_fabric(devices):
    """Exports and imports the smallest piece of each device's memory."""
    for ordinal in devices.ordinals:
        segment = Segment.create(devices, ordinal, 1, FABRIC)
        with undone_on_error() as undo:
            undo.add(segment.close)
            fd, note = segment.export()
            try:
                Segment.import_(devices, fd, note).close()
            finally:
                os.close(fd)
        segment.close()


def _location(driver, ordinal):
    location = driver.CUmemLocation()
    location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = ordinal
    return location


def _properties(driver, ordinal, handle_type):
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.requestedHandleTypes = _handle_type_of(driver, handle_type)
    properties.location = _location(driver, ordinal)
    return properties


def _handle_type_of(driver, handle_type):
    return getattr(driver.CUmemAllocationHandleType, _HANDLE_TYPES[handle_type])


def _granularity(devices, handle_type) -> int:
    """Sizes and addresses are multiples of it: the largest of the devices'."""
    driver = devices.driver
    option = driver.module.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return max(
        driver.call(
            "cuMemGetAllocationGranularity",
            _properties(driver.module, ordinal, handle_type),
            option,
            on=devices.labels[ordinal],
        )
        for ordinal in devices.ordinals
    )


def _create(devices, ordinal, size, handle_type):
    properties = _properties(devices.driver.module, ordinal, handle_type)
    remedy = _NO_FABRIC if handle_type == FABRIC else ""
    try:
        return devices.driver.call(
            "cuMemCreate", size, properties, 0, on=devices.labels[ordinal], remedy=remedy
        )
    except CudaError as error:
        if error.result != "CUDA_ERROR_OUT_OF_MEMORY":
            raise
        free, total = devices.memory_info(ordinal)
        raise OutOfCudaMemoryError(
            _what_leaves_room(devices.labels[ordinal], size, free, total),
            error.call,
            error.result,
        ) from error


def _what_leaves_room(label, wanted, free, total):
    text = (
        f"cuMemCreate on {label}: CUDA_ERROR_OUT_OF_MEMORY; {wanted:,} bytes are wanted, "
        f"{free:,} of {total:,} are free; make the Domain smaller, whose sizes "
        "jax_iser.domain.describe(config) has"
    )
    fraction = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", _XLA_FRACTION))
    fraction -= (wanted - free) / max(total, 1) + 0.02  # and something for kernels and libraries
    if fraction > 0:
        text += (
            f", or set XLA_PYTHON_CLIENT_MEM_FRACTION={fraction:.2f} or "
            "XLA_PYTHON_CLIENT_PREALLOCATE=false before JAX starts"
        )
    return text


def _import(devices, fd, note):
    driver, exported, remedy = devices.driver, fd, ""
    if note["handle_type"] == FABRIC:
        handle = driver.module.CUmemFabricHandle()
        handle.data = bytes.fromhex(note["fabric"])
        exported, remedy = handle.getPtr(), _NO_FABRIC
    key = _handle_type_of(driver.module, note["handle_type"])
    return driver.call(
        "cuMemImportFromShareableHandle", exported, key, on=note["owner"], remedy=remedy
    )


def _round_up(size: int, to: int) -> int:
    return -(-size // to) * to
