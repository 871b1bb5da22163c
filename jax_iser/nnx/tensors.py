"""Checkpoint tensors as NumPy arrays: of mappings, open safetensors files, and files by path."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

INDEX_FILE = "model.safetensors.index.json"
_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


class SafetensorsHandle(Protocol):
    """What `safetensors.safe_open` gives."""

    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str) -> Any: ...


class _OpenFile(Mapping):
    """An open safetensors file as a mapping."""

    def __init__(self, handle: SafetensorsHandle):
        self._handle, self._names = handle, list(handle.keys())

    def __getitem__(self, name: str):
        try:
            return self._handle.get_tensor(name)
        except AttributeError as error:  # NumPy has no such dtype, says safetensors
            raise TypeError(
                f"safetensors cannot read {name} by this framework ({error}); pass the path of the "
                'file instead of the open file, or open it with framework="pt"'
            ) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _Files(Mapping):
    """Safetensors files by path; a tensor is read from its file when it is asked for."""

    def __init__(self, paths: list[Path]):
        self._entries = {}
        for path in paths:
            header, start = _read_header(path)
            for name, entry in header.items():
                if name != "__metadata__":
                    self._entries[name] = (path, start, entry)

    def __getitem__(self, name: str) -> np.ndarray:
        path, start, entry = self._entries[name]
        if entry["dtype"] not in _DTYPES:
            raise TypeError(f"{name} of {path} is {entry['dtype']}, expected floats")
        begin, end = entry["data_offsets"]
        dtype, shape = np.dtype(_DTYPES[entry["dtype"]]), tuple(entry["shape"])
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{path}: {name} has {end - begin} bytes, expected {shape} of {dtype}")
        data = np.fromfile(path, np.uint8, count=end - begin, offset=start + begin)
        if data.size != end - begin:
            raise ValueError(f"{path}: {name} ends after {data.size} of {end - begin} bytes")
        return data.view(dtype).reshape(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _read_header(path: Path) -> tuple[dict, int]:
    """The JSON header of a safetensors file, and where its tensors begin."""
    with open(path, "rb") as file:
        num_bytes = int.from_bytes(file.read(8), "little")
        if num_bytes > min(os.fstat(file.fileno()).st_size, 100_000_000):
            raise ValueError(f"{path}: not a safetensors file")
        try:
            return json.loads(file.read(num_bytes)), 8 + num_bytes
        except ValueError as error:
            raise ValueError(f"{path}: not a safetensors file: {error}") from error


def open_tensors(tensors) -> Mapping[str, Any]:
    """Tensors by name, of what `load_hf` takes."""
    if isinstance(tensors, Mapping):
        return tensors
    if isinstance(tensors, (str, os.PathLike)):
        path = Path(tensors)
        if not path.is_dir():
            return _Files([path])
        index = path / INDEX_FILE
        if index.exists():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            return _Files([path / name for name in names])
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise ValueError(f"{path} holds no *.safetensors file; pass a folder that does")
        return _Files(files)
    if hasattr(tensors, "keys") and hasattr(tensors, "get_tensor"):
        return _OpenFile(tensors)
    raise TypeError(
        f"tensors is a {type(tensors).__name__}, expected a mapping of arrays by name, an open "
        "safetensors file, or the path of one or of a folder of them"
    )


def as_numpy(name: str, tensor) -> np.ndarray:
    """The tensor as a NumPy array: of JAX, NumPy or torch, bfloat16 and FP8 of torch too.

    Raises:
      TypeError: a tensor without values that NumPy can take.
    """
    torch = sys.modules.get("torch")  # imported, if there are tensors of it
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _of_torch(name, tensor, torch)
    array = np.asarray(tensor)
    if array.dtype == object:
        raise TypeError(f"{name} is a {type(tensor).__name__}, expected an array")
    return array


def _of_torch(name, tensor, torch) -> np.ndarray:
    """By bytes: NumPy knows neither bfloat16 nor FP8 of torch."""
    text = str(tensor.dtype).removeprefix("torch.")
    try:
        dtype = np.dtype(getattr(ml_dtypes, text, text))
    except TypeError:
        raise TypeError(f"{name} is {tensor.dtype}, expected floats") from None
    if tensor.is_meta:
        raise TypeError(f"{name} is a meta tensor without values; load the checkpoint first")
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().view(dtype).reshape(tuple(tensor.shape))
