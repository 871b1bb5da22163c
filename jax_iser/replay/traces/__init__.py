"""Recorded routing in, whatever recorded it; the format is told from the content of the files."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

from jax_iser.replay.trace import Trace
from jax_iser.replay.traces.errors import LIMITS as LIMITS
from jax_iser.replay.traces.errors import Limits as Limits
from jax_iser.replay.traces.errors import TraceError as TraceError
from jax_iser.replay.traces.npz import read_npy, read_npz, write_npz
from jax_iser.replay.traces.numpy_dict import holds_dict, read_numpy_dict
from jax_iser.replay.traces.sglang import read_sglang
from jax_iser.replay.traces.tensorrt_llm import read_tensorrt_llm
from jax_iser.replay.traces.text import read_json, read_megatron

__all__ = ["LIMITS", "Limits", "TraceError", "open_traces", "sniff", "write_npz"]

_KINDS = "an .npz or .npy of routes, an SGLang .pt, JSON counts, a Megatron or TensorRT-LLM trace"


# What read_json knows to hold counts.
_COUNTS = {"logical_count", "load_history"}
# What Megatron's recorder writes beside its records: tensors of what it was asked to capture.
_MEGATRON_SIDECAR = re.compile(r"(hidden_states|logits)_rank\d+\.bin|router_state_rank\d+\.pt")


def sniff(path) -> str:
    """What a file holds: npz, npy, numpy_dict, torch, safetensors, megatron, meta_info or json.

    Raises:
      TraceError: on a pickle, or on anything else that is no trace.
    """
    path = Path(path)
    with open(path, "rb") as stream:
        start = stream.read(4096)
    if not start:
        raise TraceError(path, "file", "an empty file", _KINDS)
    if start.startswith(b"PK"):
        return _sniff_zip(path)
    if start.startswith(b"\x93NUMPY"):
        return "numpy_dict" if holds_dict(path) else "npy"
    if start.startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        expected = "a file that is no program; torch.save in its zip format is read"
        raise TraceError(path, "file", "a bare pickle, which is code", expected)
    if len(start) > 8 and start[8:9] == b"{" and int.from_bytes(start[:8], "little") < 2**27:
        return "safetensors"
    if start.lstrip()[:1] in (b"{", b"["):
        return _sniff_json(path)
    raise TraceError(path, "file", f"the bytes {start[:8]!r}", _KINDS)


def _sniff_zip(path):
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise TraceError(path, "archive", f"a broken zip ({error})", "a zip archive") from None
    if any(name == "data.pkl" or name.endswith("/data.pkl") for name in names):
        return "torch"
    return "npz"


def _sniff_json(path):
    with open(path, "rb") as stream:
        line = stream.readline(LIMITS.line_bytes)
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return "json"  # several lines, or broken: its reader says so
    if isinstance(record, dict) and "top_indices" in record:
        return "megatron"
    if isinstance(record, dict) and "num_experts" in record and not _COUNTS & set(record):
        return "meta_info"
    return "json"


def open_traces(path, num_experts: int | None = None) -> list[Trace]:
    """The traces at a path: a file, a recording of several files, or a folder of traces.

    Args:
      path: a file, or a folder whose files are all of one kind.
      num_experts: for formats that do not state it; checked where they do.

    Raises:
      TraceError: naming file, field, found and expected.
    """
    path = Path(path)
    if not path.exists():
        raise TraceError(path, "file", "nothing", "a trace")
    try:
        if path.is_dir():
            return _open_folder(path, num_experts)
        return [_open_files(sniff(path), [path], path.stem, num_experts)]
    except OSError as error:
        raise TraceError(path, "file", error.strerror or error, "a readable file") from None


def _open_folder(folder, num_experts):
    files = [p for p in sorted(folder.iterdir()) if p.is_file() and not p.name.startswith(".")]
    if (folder / "meta_info.json") in files:
        return [read_tensorrt_llm(folder, num_experts)]
    files = [p for p in files if not _is_beside(p)]
    # A rank without anything to record leaves an empty file.
    kinds = {sniff(file): file for file in files if file.stat().st_size}
    if len(kinds) != 1:
        found = f"files of kinds {sorted(kinds)}" if kinds else "no trace"
        raise TraceError(folder, "files", found, "files of one kind: " + _KINDS)
    kind = next(iter(kinds))
    files = [file for file in files if file.stat().st_size]
    if kind in ("torch", "megatron"):
        return [_open_files(kind, files, folder.name, num_experts)]
    return [_open_files(kind, [file], file.stem, num_experts) for file in files]


def _is_beside(path) -> bool:
    """Whether a file of a folder is no trace but stands beside one."""
    return path.suffix in (".md", ".txt") or bool(_MEGATRON_SIDECAR.fullmatch(path.name))


def _open_files(kind, files, name, num_experts) -> Trace:
    if kind == "torch":
        return read_sglang(files, name, num_experts)
    if kind == "megatron":
        return read_megatron(files, name, num_experts)
    if kind in ("meta_info", "safetensors"):
        if not (files[0].parent / "meta_info.json").is_file():
            raise TraceError(files[0], "file", "no meta_info.json beside it", "TensorRT-LLM's")
        return read_tensorrt_llm(files[0].parent, num_experts)
    readers: dict[str, Callable[..., Trace]] = {
        "npz": read_npz,
        "npy": read_npy,
        "numpy_dict": read_numpy_dict,
        "json": read_json,
    }
    return readers[kind](files[0], num_experts)
