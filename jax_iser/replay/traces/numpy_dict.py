"""sglang-jax's expert distribution: a dict of arrays that `np.save` wrote, read without running it.

`np.save` of a dict writes an object array of one element, which is a pickle; see `pickle_machine`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jax_iser.replay.traces.archive import read_header
from jax_iser.replay.traces.counts import CountTrace
from jax_iser.replay.traces.errors import LIMITS, TraceError
from jax_iser.replay.traces.npz import checked_experts
from jax_iser.replay.traces.pickle_machine import Machine, Name
from jax_iser.replay.traces.sglang import dense_counts

_ARRAY, _DTYPE = "numpy ndarray", "numpy dtype"
_RECONSTRUCT = ("numpy._core.multiarray _reconstruct", "numpy.core.multiarray _reconstruct")


def holds_dict(path) -> bool:
    """Whether an `.npy` is an object array of one element."""
    with open(path, "rb") as stream:
        header = read_header(path, "array", stream, objects=True)
    return header.dtype.hasobject and header.shape == ()


def read_numpy_dict(path, num_experts: int | None = None) -> CountTrace:
    """Counts under `logical_count`, integers `[L, E]` or `[steps, L, E]`."""
    size = Path(path).stat().st_size
    if size > LIMITS.pickle_bytes:
        raise TraceError(path, "file", f"{size} bytes", f"at most {LIMITS.pickle_bytes}")
    with open(path, "rb") as stream:
        read_header(path, "array", stream, objects=True)
        content = _Machine(path, stream.read()).run()
    value = content.only if isinstance(content, _Array) else None
    if not isinstance(value, dict) or "logical_count" not in value:
        found = f"keys {sorted(map(str, value))[:6]}" if isinstance(value, dict) else "no dict"
        raise TraceError(path, "array", found, "a dict with logical_count")
    array = value["logical_count"]
    counts = array.values if isinstance(array, _Array) else None
    if counts is None or counts.dtype.kind not in "iu" or counts.ndim not in (2, 3):
        found = type(array).__name__ if counts is None else f"{counts.dtype} of {counts.shape}"
        raise TraceError(path, "logical_count", found, "integers [L, E] or [steps, L, E]")
    if counts.size and not 0 <= int(counts.min()) <= int(counts.max()) < 2**31:
        found = f"values from {counts.min()} to {counts.max()}"
        raise TraceError(path, "logical_count", found, f"values from 0 to {2**31 - 1}")
    parts = [counts.reshape(-1, *counts.shape[-2:]).astype(np.int64)]
    trace = dense_counts(path, Path(path).stem, parts)
    checked_experts(path, trace.num_experts, num_experts)
    return trace


class _Array:
    """An array under construction: `values` for numbers, `only` for one object."""

    def __init__(self):
        self.values, self.only = None, None


class _Dtype:
    def __init__(self, text):
        self.text, self.order = text, "="


class _Machine(Machine):
    names = frozenset((*_RECONSTRUCT, _ARRAY, _DTYPE))
    field = "array"

    _binbytes = _short_binbytes = _binbytes8 = Machine.push

    def _reduce(self, _):
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, Name) or not isinstance(arguments, tuple):
            raise self.refusal("a call of something else than an array's")
        if function.text in _RECONSTRUCT and arguments[:1] == (Name(_ARRAY),):
            self.push(_Array())
        elif function.text == _DTYPE and isinstance(arguments[0], str):
            self.push(_Dtype(arguments[0]))
        else:
            raise self.refusal(f"a call of {function.text.replace(' ', '.')}")

    def _build(self, _):
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, _Dtype):
            target.order = {"|": "=", "<": "<", ">": ">", "=": "="}[state[1]]
        elif isinstance(target, _Array):
            self._fill(target, *state[1:])
        else:
            raise self.refusal("a state of what is no array")

    def _fill(self, array, shape, dtype, fortran, data):
        if not isinstance(dtype, _Dtype) or fortran:
            raise self.refusal("an array of unknown type or order")
        if dtype.text.startswith("O"):
            if shape != () or len(data) != 1:
                raise self.refusal("an array of several objects")
            array.only = data[0]
            return
        numbers = np.dtype(dtype.text).newbyteorder(dtype.order)
        if numbers.kind not in "biuf":
            raise self.refusal(f"an array of {numbers}")
        array.values = np.frombuffer(data, numbers).reshape(shape)
