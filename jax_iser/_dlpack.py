"""Memory of our own as a jax.Array, by DLPack.

The array keeps the memory: what releases it is called once JAX has dropped the last buffer over it,
wherever copies of the array went. jax 0.10 to 0.12 take the unversioned capsule ("dltensor") from
an object with `__dlpack__` and `__dlpack_device__`, whose device id is `local_hardware_id`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

_DEVICE_TYPES = {"cpu": 1, "gpu": 2, "cuda": 2}
_TYPE_CODES = {"i": 0, "u": 1, "f": 2}
_BFLOAT16 = 4
_NAME = b"dltensor"  # a consumer renames the capsule


class _Tensor(ctypes.Structure):  # DLManagedTensor of dlpack.h
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


_libc = ctypes.CDLL(None)
_libc.malloc.restype, _libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
_libc.free.restype, _libc.free.argtypes = None, [ctypes.c_void_p]
_python = ctypes.pythonapi
_python.PyCapsule_New.restype = ctypes.py_object
_python.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_python.PyCapsule_IsValid.argtypes = [ctypes.py_object, ctypes.c_char_p]

_releases: dict[int, Callable[[], None]] = {}  # by address of the tensor that a buffer holds


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _delete(tensor):
    release = _releases.pop(tensor, None)
    if release is None:  # _forget_all was faster
        return
    _libc.free(tensor)
    # On a thread of its own: JAX drops buffers on any thread, one that kernels wait for included.
    with contextlib.suppress(RuntimeError):  # the interpreter ends, and with it the memory
        threading.Thread(target=release, name="jax_iser-release", daemon=True).start()


@atexit.register  # before JAX's own, which is older
def _forget_all():
    """Leaves the memory to the end of the process: no Python may run once the interpreter ends."""
    free = ctypes.cast(_libc.free, ctypes.c_void_p).value
    for tensor in list(_releases):
        if _releases.pop(tensor, None) is not None:
            _Tensor.from_address(tensor).deleter = free


class _Exporter:
    """What `jax.dlpack.from_dlpack` takes."""

    def __init__(self, tensor: int, device: tuple[int, int]):
        self._device = device
        # It needs no destructor: as_jax_array sees whether JAX took it.
        self.capsule = _python.PyCapsule_New(tensor, _NAME, None)

    def __dlpack__(self, *, stream: Any = None, **_: Any):
        return self.capsule  # whatever the stream: the memory was written and waited for

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


def as_jax_array(
    address: int,
    dtype: Any,
    shape: Sequence[int],
    device: jax.Device,
    release: Callable[[], None],
) -> jax.Array:
    """A `jax.Array` over memory at `address`, row-major, without a copy.

    Args:
      address: as `device` sees it; nothing may write there any more.
      device: the jax device that the memory belongs to.
      release: called once, on a thread of its own, when the last buffer over the memory is gone;
        not at the end of the process. If this function fails, it is not called.

    Raises:
      TypeError: a dtype that DLPack or JAX has no name for.
      RuntimeError: this jax copied the memory, or has it on another device.
    """
    dl_device = (_DEVICE_TYPES[device.platform], device.local_hardware_id)
    tensor = _make_tensor(address, np.dtype(dtype), tuple(shape), dl_device)
    exporter = _Exporter(tensor, dl_device)
    kept = _Once(release)
    _releases[tensor] = kept
    try:
        array = jax.dlpack.from_dlpack(exporter)
        if array.unsafe_buffer_pointer() != address or array.devices() != {device}:
            raise RuntimeError(
                f"this jax made {array.devices()} at {array.unsafe_buffer_pointer():#x} of memory "
                f"of {device} at {address:#x}; jax_iser needs a view"
            )
    except BaseException:
        kept.is_off = True  # the caller still has the memory
        if _python.PyCapsule_IsValid(exporter.capsule, _NAME):  # not taken by JAX
            del _releases[tensor]
            _libc.free(tensor)
        raise
    return array


class _Once:
    """A release that can be called off."""

    def __init__(self, release):
        self._release, self.is_off = release, False

    def __call__(self):
        if not self.is_off:
            self._release()


def _make_tensor(address, dtype, shape, dl_device) -> int:
    """A DLManagedTensor with its shape and strides in one block of malloc: free() ends it."""
    if dtype.name != "bfloat16" and dtype.kind not in _TYPE_CODES:
        raise TypeError(f"dtype {dtype} cannot be placed; use bfloat16, float or integer weights")
    ndim = len(shape)
    head = ctypes.sizeof(_Tensor)
    block = _libc.malloc(head + 2 * 8 * ndim)
    if not block:
        raise MemoryError("malloc of a DLPack tensor")
    sizes = (ctypes.c_int64 * (2 * ndim)).from_address(block + head)
    sizes[:ndim] = shape
    for axis in range(ndim):
        sizes[ndim + axis] = int(np.prod(shape[axis + 1 :], dtype=np.int64))
    _Tensor.from_address(block).__init__(  # type: ignore[misc]
        data=address,
        device_type=dl_device[0],
        device_id=dl_device[1],
        ndim=ndim,
        type_code=_BFLOAT16 if dtype.name == "bfloat16" else _TYPE_CODES[dtype.kind],
        type_bits=8 * dtype.itemsize,
        type_lanes=1,
        shape=block + head,
        strides=block + head + 8 * ndim,
        byte_offset=0,
        manager=None,
        deleter=ctypes.cast(_delete, ctypes.c_void_p).value,
    )
    return block
