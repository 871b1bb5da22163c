"""Arrays within zip archives and `.npy` files, without pickle and without reading them whole."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from jax_iser.replay.traces.errors import LIMITS, TraceError

_MIB = 2**20


class Header(NamedTuple):
    """Shape and dtype of a `.npy` stream, and the bytes before its data."""

    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        size = self.dtype.itemsize
        for dim in self.shape:
            size *= dim
        return size


def open_archive(path) -> zipfile.ZipFile:
    """A zip archive whose directory makes sense."""
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise TraceError(path, "archive", f"a broken zip ({error})", "a zip archive") from None
    names = archive.namelist()
    if len(names) > LIMITS.members:
        archive.close()
        raise TraceError(path, "archive", f"{len(names)} members", f"at most {LIMITS.members}")
    if len(set(names)) != len(names):
        archive.close()
        raise TraceError(path, "archive", "a member name twice", "distinct member names")
    return archive


def check_member(path, info: zipfile.ZipInfo) -> zipfile.ZipInfo:
    """The member, unless it unpacks to far more than it packs: a zip bomb."""
    packed, unpacked = max(info.compress_size, 1), info.file_size
    if unpacked > _MIB and unpacked > LIMITS.ratio * packed:
        raise TraceError(
            path,
            info.filename,
            f"{packed} bytes that unpack to {unpacked}",
            f"at most {LIMITS.ratio:g} times the packed size (write the array uncompressed)",
        )
    if info.flag_bits & 1:
        raise TraceError(path, info.filename, "an encrypted member", "a plain one")
    return info


@contextmanager
def reading(path, field: str):
    """Turns what a broken archive raises while it is read into a `TraceError`."""
    try:
        yield
    except TraceError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError) as error:
        raise TraceError(path, field, f"unreadable data ({error})", "intact data") from None


def read_whole(path, archive: zipfile.ZipFile, name: str, limit: int) -> bytes:
    """A member's bytes, at most `limit`."""
    info = check_member(path, archive.getinfo(name))
    if info.file_size > limit:
        raise TraceError(path, name, f"{info.file_size} bytes", f"at most {limit}")
    with reading(path, name), archive.open(info) as stream:
        data = stream.read(limit + 1)
    if len(data) != info.file_size:
        raise TraceError(path, name, f"{len(data)} bytes", f"the {info.file_size} of its entry")
    return data


def read_header(path, field: str, stream, objects: bool = False) -> Header:
    """The header of a `.npy` stream; object arrays, which are pickles, only where asked for."""
    try:
        version = np.lib.format.read_magic(stream)
        reader = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }.get(version)
        if reader is None:
            raise TraceError(path, field, f"npy version {version}", "version 1.0 or 2.0")
        shape, fortran, dtype = reader(stream, max_header_size=10_000)
    except TraceError:
        raise
    except Exception as error:  # the header is a Python literal: many ways to be broken
        raise TraceError(path, field, f"a broken npy header ({error})", "an npy array") from None
    if dtype.hasobject and not objects:
        raise TraceError(path, field, "an object array, which is a pickle", "an array of integers")
    if fortran and len(shape) > 1:
        raise TraceError(path, field, "Fortran order", "C order (numpy.ascontiguousarray)")
    if any(dim < 0 for dim in shape):
        raise TraceError(path, field, f"shape {shape}", "dimensions of at least 0")
    return Header(shape, dtype, stream.tell())


def member_header(path, archive: zipfile.ZipFile, name: str) -> Header:
    """The header of an archive's array `name`, checked against its member's size."""
    info = check_member(path, archive.getinfo(f"{name}.npy"))
    with reading(path, name), archive.open(info) as stream:
        header = read_header(path, name, stream)
    if header.offset + header.nbytes != info.file_size:
        raise TraceError(
            path,
            name,
            f"{info.file_size - header.offset} bytes of data",
            f"{header.nbytes} for {header.dtype} of shape {header.shape}",
        )
    return header


def read_array(path, archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """A small array of an archive, whole."""
    header = member_header(path, archive, name)
    data = read_whole(path, archive, f"{name}.npy", LIMITS.unpacked_bytes)
    return np.frombuffer(data, header.dtype, offset=header.offset).reshape(header.shape)


def stream_rows(path, name: str, header: Header, stream, rows: int) -> Iterator[np.ndarray]:
    """Blocks of `rows` leading rows from a stream that stands after the header."""
    size = header.dtype.itemsize * int(np.prod(header.shape[1:], dtype=np.int64))
    left = header.shape[0]
    while left:
        count = min(rows, left)
        with reading(path, name):
            data = stream.read(count * size)
        if len(data) != count * size:
            raise TraceError(path, name, "the end of the file", f"{left} more rows")
        yield np.frombuffer(data, header.dtype).reshape(count, *header.shape[1:])
        left -= count
