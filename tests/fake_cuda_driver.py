"""A model of the CUDA driver API, in place of `cuda.bindings.driver`, for tests without a GPU.

It follows what the driver's documentation says of virtual memory management, primary contexts and
streams, and returns the errors named there. A device's memory is real host memory: memfds, mapped
where cuMemAddressReserve said, so that what is mapped can be read, what is not faults, and
descriptors mean the same in every process that has a `FakeDriver` of its own.

Results are tuples that begin with a CUresult, as in cuda-python; structures take known fields only.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
import threading
from collections import Counter
from types import SimpleNamespace

GRANULARITY = 1 << 16
NAME = "fake-cuda-device-"  # of the memfds of a device's memory


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_NOT_PERMITTED = 800
    CUDA_ERROR_NOT_SUPPORTED = 801
    CUDA_ERROR_UNKNOWN = 999


class CUmemAllocationType(enum.IntEnum):
    CU_MEM_ALLOCATION_TYPE_PINNED = 1


class CUmemLocationType(enum.IntEnum):
    CU_MEM_LOCATION_TYPE_DEVICE = 1


class CUmemAllocationHandleType(enum.IntEnum):
    CU_MEM_HANDLE_TYPE_NONE = 0
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1
    CU_MEM_HANDLE_TYPE_FABRIC = 8


class CUmemAccess_flags(enum.IntEnum):  # noqa: N801 (the driver's names)
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3


class CUmemAllocationGranularity_flags(enum.IntEnum):  # noqa: N801
    CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0


class CUstream_flags(enum.IntEnum):  # noqa: N801
    CU_STREAM_NON_BLOCKING = 1


class CUdevice_attribute(enum.IntEnum):  # noqa: N801
    CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103


class CUpointer_attribute(enum.IntEnum):  # noqa: N801
    CU_POINTER_ATTRIBUTE_CONTEXT = 1


class CUmemLocation:
    __slots__ = ("id", "type")


class CUmemAllocationProp:
    __slots__ = ("location", "requestedHandleTypes", "type")


class CUmemAccessDesc:
    __slots__ = ("flags", "location")


class CUmemFabricHandle:
    def __init__(self):
        self._bytes = ctypes.create_string_buffer(64)

    @property
    def data(self) -> bytes:
        return self._bytes.raw

    @data.setter
    def data(self, value: bytes) -> None:
        assert len(value) == 64
        self._bytes.raw = value

    def getPtr(self) -> int:  # noqa: N802
        return ctypes.addressof(self._bytes)


class _Opaque:
    """What the bindings wrap integers in: only int() opens it."""

    def __init__(self, value: int):
        self._value = value

    def __int__(self) -> int:
        return self._value


class _RefusedError(Exception):
    """Carries the CUresult of a call that changes nothing."""


def _refuse_unless(condition, name):
    if not condition:
        raise _RefusedError(CUresult[name])


class _Physical:
    """Memory of a device; it lives while a handle, a mapping or a shareable handle does."""

    def __init__(self, device, size, types, fd, is_imported=False):
        self.device, self.size, self.types, self.fd = device, size, types, fd
        self.is_imported = is_imported  # not charged to a device of this process
        self.num_handles, self.num_mappings = 0, 0

    def drop_if_unused(self):
        if self.num_handles == self.num_mappings == 0:
            os.close(self.fd)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_NO_ACCESS, _MAP_FIXED, _MAP_NORESERVE = 0, 0x10, 0x4000
_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE


def _mmap(address, size, protection, flags, fd=-1) -> int:
    found = _libc.mmap(address, size, protection, flags, fd, 0)
    assert found not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
    return found


_FABRIC: dict[bytes, _Physical] = {}  # fabric handles of this host


class FakeDriver:
    """The functions of the driver, for one process.

    Args:
      num_devices: GPUs of the process.
      device_bytes: memory of each.
      no_access: pairs (device, peer) that cuDeviceCanAccessPeer denies.
      fabric: whether fabric handles work.
      first_device: number, on the host, of device 0 of this process.

    Attributes:
      calls: names of the functions called, in order.
      fail_at: indices into `calls` that return `failure` and do nothing else; `fail_from`: all
        from there on, as after a fault of a kernel.
    """

    def __init__(
        self, num_devices=2, device_bytes=1 << 30, *, no_access=(), fabric=False, first_device=0
    ):
        self.num_devices, self.device_bytes = num_devices, device_bytes
        self.no_access, self.fabric, self.first_device = set(no_access), fabric, first_device
        self.attributes: dict[CUdevice_attribute, int] = {}  # others are 1
        self.names = [f"Fake GPU {i}" for i in range(num_devices)]
        self.pointers: dict[int, int | None] = {}  # device of unmapped memory, if it tells one
        self.calls: list[str] = []
        self.fail_at: set[int] = set()
        self.fail_from: int | None = None
        self.failure = CUresult.CUDA_ERROR_UNKNOWN
        self._initialized = False
        self._misuses: list[str] = []
        self._used = [0] * num_devices
        self._next = 1
        self._handles: dict[int, _Physical] = {}
        self._reserved: dict[int, int] = {}
        self._mapped: dict[int, tuple[int, _Physical]] = {}  # by address: size, memory
        self._access: dict[int, set[int]] = {}
        self._retained: Counter[int] = Counter()
        self._streams: dict[int, tuple[int, list]] = {}  # device, work not done yet
        self._pinned: dict[int, tuple[int, ctypes.Array]] = {}
        self._thread = threading.local()

    def __getattr__(self, name):
        function = FakeDriver.__dict__.get(f"_{name}") if name.startswith("cu") else None
        if function is None:
            if name in globals() and name.startswith("CU"):
                return globals()[name]
            raise AttributeError(f"the fake driver has no {name}")

        def call(*arguments):
            index = len(self.calls)
            self.calls.append(name)
            if index in self.fail_at or (self.fail_from is not None and index >= self.fail_from):
                if name == "cuStreamSynchronize":  # what was to be waited for is lost
                    self._streams[int(arguments[0])][1].clear()
                return self._failed(self.failure, name)
            if not self._initialized and name != "cuInit":
                return self._failed(CUresult.CUDA_ERROR_NOT_INITIALIZED, name)
            try:
                outputs = function(self, *arguments)
            except _RefusedError as refused:
                return self._failed(refused.args[0], name)
            if outputs is None:
                return (CUresult.CUDA_SUCCESS,)
            return (CUresult.CUDA_SUCCESS, *(outputs if type(outputs) is tuple else (outputs,)))

        return call

    def _failed(self, result, name):
        return (result, None, None) if name == "cuMemGetInfo" else (result, None)

    def leaks(self) -> list[str]:
        """What is still there, in words, and what was done that must not be."""
        counts = {
            "handles": len(self._handles),
            "reserved addresses": len(self._reserved),
            "mappings": len(self._mapped),
            "contexts retained": self._retained.total(),
            "streams": len(self._streams),
            "pinned buffers": len(self._pinned),
            "contexts on the stack": len(self._stack()),
            "bytes": sum(self._used),
        }
        return [f"{number} {what}" for what, number in counts.items() if number] + self._misuses

    def drain(self) -> None:
        """Gives back what calls that were made to fail have left."""
        for address, (size, _) in list(self._mapped.items()):
            self._cuMemUnmap(address, size)
        for handle in list(self._handles):
            self._cuMemRelease(handle)
        for address, size in list(self._reserved.items()):
            self._cuMemAddressFree(address, size)

    def _forbid(self, condition, text):
        """Fails the test, also where exceptions are caught: legal in the driver, not here."""
        if condition:
            self._misuses.append(text)
            raise AssertionError(text)

    # Devices and contexts

    def _device(self, device) -> int:
        _refuse_unless(0 <= int(device) < self.num_devices, "CUDA_ERROR_INVALID_DEVICE")
        return int(device)

    def _stack(self) -> list[int]:
        if not hasattr(self._thread, "stack"):
            self._thread.stack = []
        return self._thread.stack

    def _current(self) -> int:
        _refuse_unless(self._stack(), "CUDA_ERROR_INVALID_CONTEXT")
        device = self._stack()[-1]
        _refuse_unless(self._retained[device], "CUDA_ERROR_INVALID_CONTEXT")
        return device

    def _cuInit(self, flags):  # noqa: N802
        _refuse_unless(flags == 0, "CUDA_ERROR_INVALID_VALUE")
        self._initialized = True

    def _cuDeviceGetCount(self):  # noqa: N802
        return self.num_devices

    def _cuDeviceGet(self, ordinal):  # noqa: N802
        return _Opaque(self._device(ordinal))

    def _cuDeviceGetName(self, length, device):  # noqa: N802
        return self.names[self._device(device)].encode().ljust(length, b"\0")

    def _cuDeviceGetUuid(self, device):  # noqa: N802
        number = self.first_device + self._device(device)
        return SimpleNamespace(bytes=number.to_bytes(16, "big"))

    def _cuDeviceGetPCIBusId(self, length, device):  # noqa: N802
        number = self.first_device + self._device(device)
        return f"0000:{number:02X}:00.0".encode().ljust(length, b"\0")

    def _cuDeviceGetAttribute(self, attribute, device):  # noqa: N802
        self._device(device)
        return self.attributes.get(CUdevice_attribute(attribute), 1)

    def _cuDeviceCanAccessPeer(self, device, peer):  # noqa: N802
        pair = self._device(device), self._device(peer)
        return int(pair not in self.no_access and pair[0] != pair[1])

    def _cuDevicePrimaryCtxRetain(self, device):  # noqa: N802
        self._retained[self._device(device)] += 1
        return _Opaque(1000 + int(device))

    def _cuDevicePrimaryCtxRelease(self, device):  # noqa: N802
        device = self._device(device)
        _refuse_unless(self._retained[device], "CUDA_ERROR_INVALID_CONTEXT")
        self._retained[device] -= 1
        if not (self._retained[device] or self.fail_at or self.fail_from is not None):
            self._forbid(self._lives_on(device), "a context goes before what was made in it")

    def _lives_on(self, device):
        memories = [memory for _, memory in self._mapped.values()] + list(self._handles.values())
        devices = [d for d, _ in [*self._streams.values(), *self._pinned.values()]]
        return device in devices or any(device == m.device for m in memories if not m.is_imported)

    def _cuCtxPushCurrent(self, context):  # noqa: N802
        device = int(context) - 1000
        _refuse_unless(
            0 <= device < self.num_devices and self._retained[device], "CUDA_ERROR_INVALID_CONTEXT"
        )
        self._stack().append(device)

    def _cuCtxPopCurrent(self):  # noqa: N802
        self._current()
        return _Opaque(1000 + self._stack().pop())

    def _cuCtxGetDevice(self):  # noqa: N802
        return _Opaque(self._current())

    def _cuPointerGetAttribute(self, attribute, pointer):  # noqa: N802
        CUpointer_attribute(attribute)
        if self._mapping_at(int(pointer)) is not None:
            return _Opaque(0)  # mapped memory belongs to no context
        _refuse_unless(int(pointer) in self.pointers, "CUDA_ERROR_INVALID_VALUE")
        device = self.pointers[int(pointer)]
        return _Opaque(0 if device is None else 1000 + device)

    def _mapping_at(self, address) -> _Physical | None:
        for start, (size, memory) in self._mapped.items():
            if start <= address < start + size:
                return memory
        return None

    # Physical memory

    def _check_properties(self, properties):
        _refuse_unless(
            properties.type is CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
            and properties.location.type is CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            and isinstance(properties.requestedHandleTypes, CUmemAllocationHandleType),
            "CUDA_ERROR_INVALID_VALUE",
        )
        return self._device(properties.location.id)

    def _cuMemGetInfo(self):  # noqa: N802
        device = self._current()
        return self.device_bytes - self._used[device], self.device_bytes

    def _cuMemGetAllocationGranularity(self, properties, option):  # noqa: N802
        self._check_properties(properties)
        CUmemAllocationGranularity_flags(option)
        return GRANULARITY

    def _cuMemCreate(self, size, properties, flags):  # noqa: N802
        device = self._check_properties(properties)
        _refuse_unless(
            flags == 0 and size > 0 and size % GRANULARITY == 0, "CUDA_ERROR_INVALID_VALUE"
        )
        types = properties.requestedHandleTypes
        is_fabric = types == CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
        _refuse_unless(self.fabric or not is_fabric, "CUDA_ERROR_NOT_PERMITTED")
        _refuse_unless(self._used[device] + size <= self.device_bytes, "CUDA_ERROR_OUT_OF_MEMORY")
        # What is left of former use: only cuMemset makes zeros of it.
        fd = os.memfd_create(f"{NAME}{self.first_device + device}-{int(types)}", os.MFD_CLOEXEC)
        os.truncate(fd, size)
        for start in range(0, size, GRANULARITY):
            os.pwrite(fd, b"\xcd" * GRANULARITY, start)
        self._used[device] += size
        return self._new_handle(_Physical(device, size, types, fd))

    def _new_handle(self, memory):
        memory.num_handles += 1
        self._handles[self._next] = memory
        self._next += 1
        return _Opaque(self._next - 1)

    def _memory_of(self, handle) -> _Physical:
        _refuse_unless(int(handle) in self._handles, "CUDA_ERROR_INVALID_VALUE")
        return self._handles[int(handle)]

    def _cuMemRelease(self, handle):  # noqa: N802
        memory = self._memory_of(handle)
        del self._handles[int(handle)]
        memory.num_handles -= 1
        self._drop_if_unused(memory)

    def _cuMemRetainAllocationHandle(self, address):  # noqa: N802
        memory = self._mapping_at(int(address))
        _refuse_unless(memory is not None, "CUDA_ERROR_INVALID_VALUE")
        return self._new_handle(memory)

    def _cuMemGetAllocationPropertiesFromHandle(self, handle):  # noqa: N802
        properties = CUmemAllocationProp()
        properties.type = CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.requestedHandleTypes = self._memory_of(handle).types
        properties.location = CUmemLocation()
        properties.location.type = CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self._memory_of(handle).device
        return properties

    def _drop_if_unused(self, memory):
        if memory.num_handles == memory.num_mappings == 0 and not memory.is_imported:
            self._used[memory.device] -= memory.size
        memory.drop_if_unused()

    # Addresses

    def _cuMemAddressReserve(self, size, alignment, address, flags):  # noqa: N802
        _refuse_unless(
            size > 0
            and size % mmap.PAGESIZE == 0
            and alignment & (alignment - 1) == 0
            and flags == 0,
            "CUDA_ERROR_INVALID_VALUE",
        )
        alignment = max(alignment, GRANULARITY)
        raw = _mmap(int(address), size + alignment, _NO_ACCESS, _ANONYMOUS)
        start = -(-raw // alignment) * alignment
        if start > raw:
            _libc.munmap(raw, start - raw)
        if raw + alignment > start:
            _libc.munmap(start + size, raw + alignment - start)
        self._reserved[start] = size
        return _Opaque(start)

    def _overlapping(self, address, size):
        return [a for a, (n, _) in self._mapped.items() if a < address + size and address < a + n]

    def _cuMemAddressFree(self, address, size):  # noqa: N802
        address = int(address)
        _refuse_unless(
            self._reserved.get(address) == size and not self._overlapping(address, size),
            "CUDA_ERROR_INVALID_VALUE",
        )
        del self._reserved[address]
        _libc.munmap(address, size)

    def _cuMemMap(self, address, size, offset, handle, flags):  # noqa: N802
        address, memory = int(address), self._memory_of(handle)
        _refuse_unless(
            offset == 0
            and flags == 0
            and size == memory.size
            and address % GRANULARITY == 0
            and any(a <= address and address + size <= a + n for a, n in self._reserved.items())
            and not self._overlapping(address, size),
            "CUDA_ERROR_INVALID_VALUE",
        )
        _mmap(
            address,
            size,
            mmap.PROT_READ | mmap.PROT_WRITE,
            mmap.MAP_SHARED | _MAP_FIXED,
            memory.fd,
        )
        self._mapped[address], self._access[address] = (size, memory), set()
        memory.num_mappings += 1

    def _cuMemUnmap(self, address, size):  # noqa: N802
        address = int(address)
        _refuse_unless(
            address in self._mapped and self._mapped[address][0] == size, "CUDA_ERROR_INVALID_VALUE"
        )
        pending = [w for _, work in self._streams.values() for w in work]
        self._forbid(pending, "memory is unmapped while copies are under way")
        _, memory = self._mapped.pop(address)
        del self._access[address]
        _mmap(address, size, _NO_ACCESS, _ANONYMOUS | _MAP_FIXED)
        memory.num_mappings -= 1
        self._drop_if_unused(memory)

    def _cuMemSetAccess(self, address, size, descriptions, count):  # noqa: N802
        address = int(address)
        _refuse_unless(
            address in self._mapped
            and self._mapped[address][0] == size
            and count == len(descriptions),
            "CUDA_ERROR_INVALID_VALUE",
        )
        for each in descriptions:
            _refuse_unless(
                each.location.type is CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
                and each.flags is CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
                "CUDA_ERROR_INVALID_VALUE",
            )
            device, owner = self._device(each.location.id), self._mapped[address][1].device
            _refuse_unless((device, owner) not in self.no_access, "CUDA_ERROR_INVALID_DEVICE")
            self._access[address].add(device)

    # Other processes

    def _cuMemExportToShareableHandle(self, handle, handle_type, flags):  # noqa: N802
        memory = self._memory_of(handle)
        _refuse_unless(flags == 0 and handle_type is memory.types, "CUDA_ERROR_INVALID_VALUE")
        if handle_type is CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC:
            exported = CUmemFabricHandle()
            exported.data = os.urandom(64)
            _FABRIC[exported.data] = memory
            return exported
        exported = os.dup(memory.fd)
        os.set_inheritable(exported, True)  # nothing promises otherwise
        return exported

    def _cuMemImportFromShareableHandle(self, exported, handle_type):  # noqa: N802
        handle_type = CUmemAllocationHandleType(handle_type)
        if handle_type is CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC:
            memory = _FABRIC.get(ctypes.string_at(exported, 64))
            _refuse_unless(memory and self.fabric, "CUDA_ERROR_NOT_PERMITTED")
            return self._import(memory.fd, handle_type)
        try:
            name = os.readlink(f"/proc/self/fd/{int(exported)}")
        except OSError:
            name = ""
        _refuse_unless(NAME in name and "-1 " in name, "CUDA_ERROR_INVALID_VALUE")
        return self._import(int(exported), handle_type)

    def _import(self, fd, handle_type):
        device = int(os.readlink(f"/proc/self/fd/{fd}").split(NAME)[1].split("-")[0])
        device -= self.first_device
        # The descriptor stays the caller's.
        size = os.fstat(fd).st_size
        return self._new_handle(_Physical(device, size, handle_type, os.dup(fd), True))

    # Streams, copies and pinned memory

    def _cuStreamCreate(self, flags):  # noqa: N802
        _refuse_unless(flags in (0, 1), "CUDA_ERROR_INVALID_VALUE")
        self._forbid(flags != 1, "a blocking stream waits for the legacy default stream")
        self._next += 1
        self._streams[self._next] = (self._current(), [])
        return _Opaque(self._next)

    def _work_of(self, stream):
        self._forbid(not int(stream), "the legacy default stream waits for every blocking stream")
        device, work = self._streams.get(int(stream), (None, None))
        _refuse_unless(work is not None, "CUDA_ERROR_INVALID_HANDLE")
        _refuse_unless(device == self._current(), "CUDA_ERROR_INVALID_CONTEXT")
        return work

    def _cuStreamDestroy(self, stream):  # noqa: N802
        for work in self._work_of(stream):
            work()
        del self._streams[int(stream)]

    def _cuStreamSynchronize(self, stream):  # noqa: N802
        work = self._work_of(stream)
        while work:
            work.pop(0)()

    def _check_device_range(self, address, size):
        for start, (length, _) in self._mapped.items():
            if start <= address and address + size <= start + length:
                _refuse_unless(self._current() in self._access[start], "CUDA_ERROR_ILLEGAL_ADDRESS")
                return
        _refuse_unless(False, "CUDA_ERROR_INVALID_VALUE")

    def _check_pinned_range(self, address, size):
        found = any(
            start <= address and address + size <= start + len(buffer)
            for start, (_, buffer) in self._pinned.items()
        )
        self._forbid(not found, "copies of pageable memory may wait for other streams")

    def _cuMemsetD8Async(self, address, value, size, stream):  # noqa: N802
        self._check_device_range(int(address), size)
        self._work_of(stream).append(lambda: ctypes.memset(int(address), value, size))

    def _copy(self, to, source, size, stream):
        self._work_of(stream).append(lambda: ctypes.memmove(to, source, size))

    def _cuMemcpyDtoHAsync(self, host, address, size, stream):  # noqa: N802
        self._check_device_range(int(address), size)
        self._check_pinned_range(int(host), size)
        self._copy(int(host), int(address), size, stream)

    def _cuMemcpyHtoDAsync(self, address, host, size, stream):  # noqa: N802
        self._check_device_range(int(address), size)
        self._check_pinned_range(int(host), size)
        self._copy(int(address), int(host), size, stream)

    def _cuMemHostAlloc(self, size, flags):  # noqa: N802
        _refuse_unless(size > 0 and flags & ~7 == 0, "CUDA_ERROR_INVALID_VALUE")
        buffer = ctypes.create_string_buffer(size)
        self._pinned[ctypes.addressof(buffer)] = (self._current(), buffer)
        return ctypes.addressof(buffer)

    def _cuMemFreeHost(self, address):  # noqa: N802
        self._current()
        _refuse_unless(int(address) in self._pinned, "CUDA_ERROR_INVALID_VALUE")
        del self._pinned[int(address)]


def open_descriptors() -> list[str]:
    """Descriptors of fake device memory that this process has open."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # listdir's own
            continue
        if NAME in name or "memfd:jax_iser" in name:
            found.append(name)
    return found
