"""Tensors of a `.pt` archive, without torch and without running its pickle.

Its pickle may use the names that `torch.save` writes for tensors; see `pickle_machine`.
"""

from __future__ import annotations

import math
import zipfile
from typing import NamedTuple

import numpy as np

from jax_iser.replay.traces.archive import check_member, open_archive, read_whole, reading
from jax_iser.replay.traces.errors import LIMITS, TraceError
from jax_iser.replay.traces.pickle_machine import Machine, Name

_STORAGES = {
    "torch DoubleStorage": "<f8",
    "torch FloatStorage": "<f4",
    "torch HalfStorage": "<f2",
    "torch LongStorage": "<i8",
    "torch IntStorage": "<i4",
    "torch ShortStorage": "<i2",
    "torch CharStorage": "i1",
    "torch ByteStorage": "u1",
    "torch BoolStorage": "?",
}
_REBUILD = "torch._utils _rebuild_tensor_v2"
_ORDERED = "collections OrderedDict"


class _Storage(NamedTuple):
    dtype: np.dtype
    key: str
    size: int


class LazyTensor(NamedTuple):
    """A tensor of an archive: read from its storage when asked for."""

    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    key: str
    size: int


class TorchArchive:
    """A `.pt` file written by `torch.save`; `content` is what it holds, tensors as `LazyTensor`.

    Raises:
      TraceError: on anything but containers of numbers, text and tensors.
    """

    def __init__(self, path):
        self.path = path
        with open_archive(path) as archive:
            names = archive.namelist()
            found = [n for n in names if n == "data.pkl" or n.endswith("/data.pkl")]
            if len(found) != 1:
                raise TraceError(path, "archive", f"{len(found)} data.pkl", "one, from torch.save")
            self._prefix = found[0][: -len("data.pkl")]
            order = self._prefix + "byteorder"
            if order in names and read_whole(path, archive, order, 16) != b"little":
                raise TraceError(path, "byteorder", "big-endian tensors", "little-endian ones")
            program = read_whole(path, archive, found[0], LIMITS.pickle_bytes)
        self.content = _Machine(path, program).run()

    def read(self, tensor: LazyTensor, field: str) -> np.ndarray:
        """A tensor's values, as a C-contiguous array."""
        name = f"{self._prefix}data/{tensor.key}"
        with open_archive(self.path) as archive:
            try:
                info = check_member(self.path, archive.getinfo(name))
            except KeyError:
                raise TraceError(self.path, field, f"no storage {name}", "its data") from None
            if info.file_size != tensor.size * tensor.dtype.itemsize:
                raise TraceError(
                    self.path,
                    field,
                    f"a storage of {info.file_size} bytes",
                    f"{tensor.size} values of {tensor.dtype}",
                )
            data = self._bytes(archive, info, field)
        flat = np.frombuffer(data, tensor.dtype)[tensor.offset :]
        strides = [step * tensor.dtype.itemsize for step in tensor.strides]
        view = np.lib.stride_tricks.as_strided(flat, tensor.shape, strides, writeable=False)
        return np.ascontiguousarray(view)

    def _bytes(self, archive: zipfile.ZipFile, info, field):
        if info.file_size > LIMITS.unpacked_bytes:
            found = f"{info.file_size} bytes"
            raise TraceError(self.path, field, found, f"at most {LIMITS.unpacked_bytes}")
        with reading(self.path, field):
            return archive.read(info)


class _Machine(Machine):
    names = frozenset((*_STORAGES, _REBUILD, _ORDERED))

    def _binpersid(self, _):
        key = self.stack.pop()
        if not (isinstance(key, tuple) and len(key) == 5 and key[0] == "storage"):
            raise self.refusal("a persistent id that is no storage")
        _, name, member, _, size = key
        if not isinstance(name, Name) or name.text not in _STORAGES:
            raise self.refusal("a storage of unknown type")
        if not isinstance(member, str) or not member.isalnum() or not _count(size):
            raise self.refusal("a storage without a name or size")
        self.push(_Storage(np.dtype(_STORAGES[name.text]), member, size))

    def _reduce(self, _):
        arguments, function = self.stack.pop(), self.stack.pop()
        if function == Name(_ORDERED) and arguments == ():
            self.push({})
        elif function == Name(_REBUILD):
            self.push(self._tensor(arguments))
        else:
            raise self.refusal("a call of something else than a tensor's rebuild function")

    def _tensor(self, arguments):
        storage, offset, shape, strides = arguments[:4]
        fits = (
            isinstance(storage, _Storage)
            and _count(offset)
            and isinstance(shape, tuple)
            and isinstance(strides, tuple)
            and len(shape) == len(strides) <= 8
            and all(map(_count, shape + strides))
        )
        if not fits:
            raise self.refusal("a tensor with a broken storage, shape or strides")
        last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        if 0 not in shape and last >= storage.size:
            raise self.refusal(f"a tensor of shape {shape} that ends outside its storage")
        if math.prod(shape) > max(storage.size, 1):
            raise self.refusal(f"a tensor of shape {shape} over {storage.size} stored values")
        return LazyTensor(storage.dtype, shape, strides, offset, storage.key, storage.size)


def _count(value) -> bool:
    return type(value) is int and 0 <= value < 2**40
