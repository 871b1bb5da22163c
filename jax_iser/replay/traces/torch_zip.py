"""Tensors of a `.pt` archive, without torch and without running its pickle.

The pickle is a program. It is stepped through here by a few opcodes that build containers, numbers,
text and tensors; the only names that it may use are those that `torch.save` writes for tensors, and
they are tokens here, never imported. Everything else is refused with the reason.
"""

from __future__ import annotations

import math
import pickletools
import zipfile
from typing import NamedTuple

import numpy as np

from jax_iser.replay.traces.archive import check_member, open_archive, read_whole, reading
from jax_iser.replay.traces.errors import LIMITS, TraceError

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


class _Name(NamedTuple):
    text: str


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


_MARK = object()


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


class _Machine:
    """Steps through a pickle; knows data, refuses code."""

    def __init__(self, path, program: bytes):
        self.path, self.program = path, program
        self.stack: list = []
        self.memo: dict = {}

    def run(self):
        try:
            for opcode, argument, _ in pickletools.genops(self.program):
                if opcode.name == "STOP":
                    return self._single()
                handler = getattr(self, f"_{opcode.name.lower()}", None)
                if handler is None:
                    raise self._refusal(f"pickle opcode {opcode.name}")
                handler(argument)
        except TraceError:
            raise
        except Exception as error:  # a pickle can be broken in any way
            raise self._refusal(f"a broken pickle ({type(error).__name__}: {error})") from None
        raise self._refusal("a pickle without an end")

    def _refusal(self, found) -> TraceError:
        expected = "containers of numbers, text and tensors only"
        return TraceError(self.path, "data.pkl", found, expected)

    def _single(self):
        if len(self.stack) != 1:
            raise self._refusal("a pickle of several values")
        return self.stack[0]

    def _push(self, value):
        self.stack.append(value)

    def _since_mark(self):
        at = len(self.stack) - 1 - self.stack[::-1].index(_MARK)
        values = self.stack[at + 1 :]
        del self.stack[at:]
        return values

    # Data: the argument is the value.
    def _proto(self, _):
        pass

    _frame = _proto
    _binint = _binint1 = _binint2 = _long1 = _binfloat = _push
    _binunicode = _short_binunicode = _binunicode8 = _push

    def _none(self, _):
        self._push(None)

    def _newtrue(self, _):
        self._push(True)

    def _newfalse(self, _):
        self._push(False)

    def _mark(self, _):
        self._push(_MARK)

    # Containers.
    def _empty_list(self, _):
        self._push([])

    def _empty_dict(self, _):
        self._push({})

    def _empty_tuple(self, _):
        self._push(())

    def _tuple(self, _):
        self._push(tuple(self._since_mark()))

    def _tuple1(self, _):
        self._tail(1)

    def _tuple2(self, _):
        self._tail(2)

    def _tuple3(self, _):
        self._tail(3)

    def _tail(self, count):
        values = tuple(self.stack[-count:])
        del self.stack[-count:]
        self._push(values)

    def _append(self, _):
        value = self.stack.pop()
        self._top_list().append(value)

    def _appends(self, _):
        values = self._since_mark()
        self._top_list().extend(values)

    def _top_list(self):
        if type(self.stack[-1]) is not list:
            raise self._refusal("values appended to what is no list")
        return self.stack[-1]

    def _setitem(self, _):
        value, key = self.stack.pop(), self.stack.pop()
        self._top_dict()[key] = value

    def _setitems(self, _):
        values = self._since_mark()
        self._top_dict().update(zip(values[::2], values[1::2], strict=True))

    def _top_dict(self):
        if type(self.stack[-1]) is not dict:
            raise self._refusal("items set on what is no dict")
        return self.stack[-1]

    # Memo.
    def _binput(self, index):
        self.memo[index] = self.stack[-1]

    _long_binput = _binput

    def _memoize(self, _):
        self.memo[len(self.memo)] = self.stack[-1]

    def _binget(self, index):
        self._push(self.memo[index])

    _long_binget = _binget

    # Names are tokens. What is made from them is decided here.
    def _global(self, text):
        if text not in _STORAGES and text not in (_REBUILD, _ORDERED):
            raise self._refusal(f"the name {text.replace(' ', '.')}, which is code")
        self._push(_Name(text))

    def _stack_global(self, _):
        name, module = self.stack.pop(), self.stack.pop()
        self._global(f"{module} {name}")

    def _binpersid(self, _):
        key = self.stack.pop()
        if not (isinstance(key, tuple) and len(key) == 5 and key[0] == "storage"):
            raise self._refusal("a persistent id that is no storage")
        _, name, member, _, size = key
        if not isinstance(name, _Name) or name.text not in _STORAGES:
            raise self._refusal("a storage of unknown type")
        if not isinstance(member, str) or not member.isalnum() or not _count(size):
            raise self._refusal("a storage without a name or size")
        self._push(_Storage(np.dtype(_STORAGES[name.text]), member, size))

    def _reduce(self, _):
        arguments, function = self.stack.pop(), self.stack.pop()
        if function == _Name(_ORDERED) and arguments == ():
            self._push({})
        elif function == _Name(_REBUILD):
            self._push(self._tensor(arguments))
        else:
            raise self._refusal("a call of something else than a tensor's rebuild function")

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
            raise self._refusal("a tensor with a broken storage, shape or strides")
        last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        if 0 not in shape and last >= storage.size:
            raise self._refusal(f"a tensor of shape {shape} that ends outside its storage")
        if math.prod(shape) > max(storage.size, 1):
            raise self._refusal(f"a tensor of shape {shape} over {storage.size} stored values")
        return LazyTensor(storage.dtype, shape, strides, offset, storage.key, storage.size)


def _count(value) -> bool:
    return type(value) is int and 0 <= value < 2**40
