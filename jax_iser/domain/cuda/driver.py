"""The CUDA driver with checked calls, and the GPUs of this process as a Domain needs them.

On `cuda.bindings.driver` of cuda-python, imported at first use. Everything runs in the devices'
primary contexts, which are XLA's too, so that addresses are valid in its kernels.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

STAGING_BYTES = 4 << 20  # pinned, one a device: what a copy to or from the host moves at a time
NAME_BYTES = 128

_LOST_CONTEXT = "an earlier kernel on this GPU failed; start the process again"
_REMEDIES = {
    "CUDA_ERROR_NO_DEVICE": "let the process see a GPU (CUDA_VISIBLE_DEVICES)",
    "CUDA_ERROR_INVALID_DEVICE": "let the process see this GPU (CUDA_VISIBLE_DEVICES)",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "reboot, or load the kernel module of this driver",
    "CUDA_ERROR_SYSTEM_NOT_READY": "start the fabric manager of this host's NVSwitches",
    "CUDA_ERROR_NOT_PERMITTED": "let the container share GPU memory between processes",
    "CUDA_ERROR_OUT_OF_MEMORY": "leave room with XLA_PYTHON_CLIENT_PREALLOCATE=false",
    "CUDA_ERROR_ILLEGAL_ADDRESS": _LOST_CONTEXT,
    "CUDA_ERROR_LAUNCH_FAILED": _LOST_CONTEXT,
    "CUDA_ERROR_LAUNCH_TIMEOUT": _LOST_CONTEXT,
    "CUDA_ERROR_ECC_UNCORRECTABLE": _LOST_CONTEXT,
}


class CudaError(RuntimeError):
    """A CUDA call failed; the text names the call, the device, the result and the remedy.

    Attributes:
      call: name of the driver's function.
      result: name of its CUresult.
    """

    def __init__(self, text: str, call: str = "", result: str = ""):
        super().__init__(text)
        self.call, self.result = call, result


@contextlib.contextmanager
def noted(error: BaseException) -> Iterator[None]:
    """What fails in the block becomes a note of `error`: the first failure is the one to raise."""
    try:
        yield
    except Exception as another:
        error.add_note(f"then, undoing it: {another}")


class Undo:
    """Steps back: run once, last first, all of them; the first that fails is raised at the end."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], Any]] = []

    def add(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """Adds a call to make."""
        self._steps.append(functools.partial(function, *arguments, **options))

    def take(self) -> Undo:
        """The steps so far, which this one will not run any more."""
        taken = Undo()
        taken._steps, self._steps = self._steps, []
        return taken

    def run(self) -> None:
        """Runs the steps. A second time does nothing."""
        first = None
        while self._steps:
            try:
                self._steps.pop()()
            except Exception as error:
                first = first or error
                if error is not first:
                    first.add_note(f"then: {error}")
        if first is not None:
            raise first


@contextlib.contextmanager
def undone_on_error() -> Iterator[Undo]:
    """Steps that run only if the block fails; its error stays the error."""
    undo = Undo()
    try:
        yield undo
    except BaseException as error:
        with noted(error):
            undo.run()
        raise


class Driver:
    """The driver's functions, each call checked.

    Args:
      module: what has the functions of `cuda.bindings.driver`; that module by default.

    Raises:
      ImportError: cuda-python is not installed.
      CudaError: there is no driver, or no GPU.
    """

    def __init__(self, module: Any = None):
        self.module = import_bindings() if module is None else module
        try:
            self.call("cuInit", 0)
        except CudaError:
            raise
        except RuntimeError as error:  # the bindings' own, for a library that is not there
            raise CudaError(
                f"cuInit: {error}; install the NVIDIA driver, or give the container access to it"
            ) from error

    def call(self, name: str, *arguments: Any, on: str = "", remedy: str = "") -> Any:
        """Calls a function; its outputs but for the CUresult: None, a value or a tuple.

        Args:
          on: the device or devices concerned, for the error.
          remedy: what to do about a failure; by default what its CUresult suggests.

        Raises:
          CudaError: the result is not CUDA_SUCCESS.
        """
        result, *values = getattr(self.module, name)(*arguments)
        if int(result) != 0:
            self._fail(name, getattr(result, "name", str(result)), on, remedy)
        return values[0] if len(values) == 1 else tuple(values) or None

    def _fail(self, name, result, on, remedy):
        remedy = remedy or _REMEDIES.get(result, "see what `jax-iser doctor` says of CUDA")
        raise CudaError(f"{name}{f' on {on}' if on else ''}: {result}; {remedy}", name, result)

    def attribute(self, device: Any, name: str) -> int:
        """A CU_DEVICE_ATTRIBUTE of a device."""
        key = getattr(self.module.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.call("cuDeviceGetAttribute", key, device))

    def describe(self, ordinal: int) -> dict[str, Any]:
        """`ordinal`, `name`, `uuid`, `pci_bus_id` and `label`, a short text, of a device."""
        on = f"GPU {ordinal}"
        device = self.call("cuDeviceGet", ordinal, on=on)
        name = _text(self.call("cuDeviceGetName", NAME_BYTES, device, on=on))
        # Before CUDA 13 only _v2 tells the parts of a MIG device apart; since then there is one.
        has_v2 = hasattr(self.module, "cuDeviceGetUuid_v2")
        identity = self.call("cuDeviceGetUuid_v2" if has_v2 else "cuDeviceGetUuid", device, on=on)
        return {
            "ordinal": ordinal,
            "name": name,
            "uuid": f"GPU-{uuid.UUID(bytes=bytes(identity.bytes)[:16])}",
            "pci_bus_id": _text(self.call("cuDeviceGetPCIBusId", NAME_BYTES, device, on=on)),
            "label": f"{on} ({name})",
        }


def import_bindings() -> Any:
    """`cuda.bindings.driver`."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise ImportError(
            f"the fused method on GPUs needs cuda-python ({error}): pip install jax-iser[cuda]"
        ) from error


def _text(padded: bytes) -> str:
    return padded.split(b"\0")[0].decode().strip()


class Devices:
    """GPUs of this process: primary contexts, and what copies between host and device need.

    Copies run on a non-blocking stream of each device, so neither waits for the kernels of other
    streams, nor they for it. Whoever uses the contexts later calls `retain()`, and everyone
    `close()`, the maker too; the last one releases them.

    Args:
      ordinals: CUDA ordinals, as this process counts them.
      driver: a `Driver`, or a module for one.

    Attributes:
      ordinals: as given.
      labels: `{ordinal: text}` that names the device in errors.
      infos: `{ordinal: Driver.describe()}`.

    Raises:
      ValueError: no ordinals, or one twice.
      CudaError: no such device, or two that cannot read each other's memory.
    """

    def __init__(self, ordinals: Sequence[int], driver: Any = None):
        self.ordinals = tuple(ordinals)
        if not self.ordinals or len(set(self.ordinals)) != len(self.ordinals):
            raise ValueError(f"device_ordinals={list(ordinals)}: pass each GPU once, at least one")
        self.driver = driver if isinstance(driver, Driver) else Driver(driver)
        self.infos = {ordinal: self.driver.describe(ordinal) for ordinal in self.ordinals}
        self.labels = {ordinal: info["label"] for ordinal, info in self.infos.items()}
        self._handles = {o: self.driver.call("cuDeviceGet", o) for o in self.ordinals}
        self._check_peers()
        self._lock, self._num_users = threading.Lock(), 1
        self._contexts: dict[int, Any] = {}
        self._copiers: dict[int, _Copier] = {}
        with undone_on_error() as undo:
            for ordinal in self.ordinals:
                self._open(ordinal, undo)
        self._resources = undo.take()

    @classmethod
    def of(cls, jax_devices: Sequence[jax.Device], driver: Any = None) -> Devices:
        """The GPUs behind JAX's devices; checks that each is the one that JAX's arrays are on.

        `local_hardware_id` is the CUDA ordinal in XLA: both count what CUDA_VISIBLE_DEVICES leaves
        visible, and `jax_cuda_visible_devices` changes neither. JAX tells no PCI bus id or UUID to
        compare, so the driver is asked where an array of the device lies.
        """
        devices = cls([device.local_hardware_id for device in jax_devices], driver)
        with undone_on_error() as undo:
            undo.add(devices.close)
            for jax_device in jax_devices:
                devices._check_identity(jax_device)
        return devices

    def _check_peers(self):
        for device, handle in self._handles.items():
            for peer, peer_handle in self._handles.items():
                if peer == device:
                    continue
                on = f"{self.labels[device]} and {self.labels[peer]}"
                if not self.driver.call("cuDeviceCanAccessPeer", handle, peer_handle, on=on):
                    raise CudaError(
                        f"{self.labels[device]} cannot access the memory of {self.labels[peer]}; "
                        "use one of them with ranks_per_device, GPUs that NVLink or PCIe "
                        'peer-to-peer connects, or method="portable"',
                        "cuDeviceCanAccessPeer",
                    )

    def _open(self, ordinal, undo):
        call, handle, on = self.driver.call, self._handles[ordinal], self.labels[ordinal]
        self._contexts[ordinal] = call("cuDevicePrimaryCtxRetain", handle, on=on)
        undo.add(call, "cuDevicePrimaryCtxRelease", handle, on=on)
        self._copiers[ordinal] = _Copier(self, ordinal)
        undo.add(self._copiers[ordinal].close)

    def _check_identity(self, jax_device):
        ordinal = jax_device.local_hardware_id
        probe = jax.device_put(np.zeros(1, np.uint8), jax_device)
        with self.current(ordinal):
            found = self._device_of(probe.unsafe_buffer_pointer())
        if found is not None and found != ordinal:
            raise CudaError(
                f"arrays on {jax_device} lie on GPU {found} for the driver, but JAX's "
                f"local_hardware_id is {ordinal}; select GPUs with CUDA_VISIBLE_DEVICES only"
            )

    def _device_of(self, address):
        """The ordinal of the device whose memory it is; None where the driver does not tell.

        Mapped memory has no context, and other memory no allocation handle.
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL would do for both, but releases of cuda-python give 0
        for every pointer (NVIDIA/cuda-python#2928).
        """
        for look in (self._device_of_mapping, self._device_of_context):
            with contextlib.suppress(CudaError):
                if (found := look(address)) is not None:
                    return found
        return None

    def _device_of_mapping(self, address):
        handle = self.driver.call("cuMemRetainAllocationHandle", address)
        try:
            location = self.driver.call("cuMemGetAllocationPropertiesFromHandle", handle).location
        finally:
            self.driver.call("cuMemRelease", handle)
        device = self.driver.module.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        return int(location.id) if location.type == device else None

    def _device_of_context(self, address):
        key = self.driver.module.CUpointer_attribute.CU_POINTER_ATTRIBUTE_CONTEXT
        context = self.driver.call("cuPointerGetAttribute", key, address)
        if not int(context):
            return None
        self.driver.call("cuCtxPushCurrent", context)
        try:
            return int(self.driver.call("cuCtxGetDevice"))
        finally:
            self.driver.call("cuCtxPopCurrent")

    @contextlib.contextmanager
    def current(self, ordinal: int) -> Iterator[None]:
        """The device's context is current in the block; then the thread's former one again."""
        on = self.labels[ordinal]
        self.driver.call("cuCtxPushCurrent", self._contexts[ordinal], on=on)
        try:
            yield
        except BaseException as error:
            with noted(error):
                self.driver.call("cuCtxPopCurrent", on=on)
            raise
        self.driver.call("cuCtxPopCurrent", on=on)

    def memory_info(self, ordinal: int) -> tuple[int, int]:
        """(free, total) bytes of a device."""
        with self.current(ordinal):
            return self.driver.call("cuMemGetInfo", on=self.labels[ordinal])

    def read(self, ordinal: int, address: int, nbytes: int) -> bytes:
        """Copies memory that the device can access to the host."""
        return self._copiers[ordinal].read(address, nbytes)

    def write(self, ordinal: int, address: int, data: Any) -> None:
        """Copies bytes or a contiguous uint8 array to memory that the device can access."""
        self._copiers[ordinal].write(address, data)

    def fill_zero(self, ordinal: int, address: int, nbytes: int) -> None:
        """Sets memory that the device can access to 0."""
        self._copiers[ordinal].fill_zero(address, nbytes)

    def retain(self) -> None:
        """One more user of the contexts, who calls `close()`."""
        with self._lock:
            if self._num_users == 0:
                raise ValueError("these Devices are closed")
            self._num_users += 1

    def close(self) -> None:
        """One user less; the last one's releases streams, staging buffers and contexts."""
        with self._lock:
            self._num_users -= 1
            is_last = self._num_users == 0
        if is_last:
            self._resources.run()


class _Copier:
    """A non-blocking stream of a device, and a pinned buffer that copies go through.

    Pinned, because the driver may copy pageable memory in ways that wait for other streams.
    """

    def __init__(self, devices, ordinal):
        self._devices, self._ordinal, self._lock = devices, ordinal, threading.Lock()
        flags = devices.driver.module.CUstream_flags.CU_STREAM_NON_BLOCKING
        with undone_on_error() as undo, devices.current(ordinal):
            self._stream = self._call("cuStreamCreate", flags.value)
            undo.add(self._call_in_context, "cuStreamDestroy", self._stream)
            self._staging = int(self._call("cuMemHostAlloc", STAGING_BYTES, 0))
            undo.add(self._call_in_context, "cuMemFreeHost", self._staging)
        self._resources = undo.take()

    def _call(self, name, *arguments):
        devices = self._devices
        return devices.driver.call(name, *arguments, on=devices.labels[self._ordinal])

    def _call_in_context(self, name, *arguments):
        with self._devices.current(self._ordinal):
            return self._call(name, *arguments)

    def read(self, address, nbytes):
        pieces = []
        with self._lock, self._devices.current(self._ordinal):
            for start in range(0, nbytes, STAGING_BYTES):
                size = min(STAGING_BYTES, nbytes - start)
                self._call("cuMemcpyDtoHAsync", self._staging, address + start, size, self._stream)
                self._call("cuStreamSynchronize", self._stream)
                pieces.append(ctypes.string_at(self._staging, size))
        return b"".join(pieces)

    def write(self, address, data):
        if not len(data):
            return
        view = np.frombuffer(data, np.uint8)
        with self._lock, self._devices.current(self._ordinal):
            for start in range(0, view.size, STAGING_BYTES):
                piece = view[start : start + STAGING_BYTES]
                ctypes.memmove(self._staging, piece.ctypes.data, piece.size)
                self._call(
                    "cuMemcpyHtoDAsync", address + start, self._staging, piece.size, self._stream
                )
                self._call("cuStreamSynchronize", self._stream)

    def fill_zero(self, address, nbytes):
        with self._lock, self._devices.current(self._ordinal):
            self._call("cuMemsetD8Async", address, 0, nbytes, self._stream)
            self._call("cuStreamSynchronize", self._stream)

    def close(self):
        self._resources.run()
