"""`load_hf`: one MoE block of a checkpoint with Hugging Face's names, all of it or nothing.

`LAYOUT` says where each variable comes from; another family of names is a few more rows. Every
tensor under the prefix is used, left out by `ignore=`, or named in an error.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jax_iser import fp8
from jax_iser.nnx import fits
from jax_iser.nnx.moe import MoE
from jax_iser.nnx.tensors import SafetensorsHandle, as_numpy, open_tensors

BLOCK = "mlp."  # what all names of a block begin with, after the prefix
SCALES = ("weight_scale_inv", "weight_scale")  # both multiply the values
_FP8 = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))
_FLOATS = (*map(np.dtype, ("float64", "float32", "float16")), np.dtype(ml_dtypes.bfloat16))
_MOST_NAMES = 12
_NUMBER = r"(?<=\.)\d+(?=\.)"  # of an expert or a layer, in a name


@dataclasses.dataclass(frozen=True)
class Row:
    """Where a variable of the module comes from.

    Attributes:
      variable: an attribute of `MoE`.
      names: alternatives, after `mlp.`; the first that the checkpoint has is read. `{expert}`
        stands for each expert's number.
    """

    variable: str
    names: tuple[str, ...]


_PLANES = ("gate", "up", "down")
LAYOUT = (
    Row("router", ("gate.weight",)),
    Row("routed_bias", ("gate.e_score_correction_bias",)),
    *(Row(plane, (f"experts.{{expert}}.{plane}_proj.weight",)) for plane in _PLANES),
    *(
        Row(
            f"shared_{plane}",
            (f"shared_experts.{plane}_proj.weight", f"shared_expert.{plane}_proj.weight"),
        )
        for plane in _PLANES
    ),
)

# Why a tensor is left over, by a pattern of its name after `mlp.`, and what to do.
REMEDIES: tuple[tuple[str, Callable[[MoE], bool], str], ...] = (
    (
        "gate.e_score_correction_bias",
        lambda moe: moe.routed_bias is None,
        "make the MoE with routed_bias=True",
    ),
    ("shared_expert_gate.*", lambda moe: True, "gated shared experts are not supported"),
    (
        "shared_expert*",
        lambda moe: not moe.has_shared,
        "make the MoE with num_shared_experts=",
    ),
    (
        "*.input_scale",
        lambda moe: True,
        "tokens are scaled as they come; leave static scales out by ignore=",
    ),
    ("*.bias", lambda moe: True, "experts with biases are not supported"),
)


def load_hf(
    moe: MoE,
    tensors: Mapping[str, Any] | SafetensorsHandle | str | os.PathLike,
    prefix: str = "",
    *,
    ignore: Sequence[str] = (),
) -> None:
    """Loads one MoE block from tensors with Hugging Face names: all of it, or nothing.

    Names after the prefix: `mlp.gate.weight` `[E, D]`, `mlp.gate.e_score_correction_bias` `[E]`,
    `mlp.experts.N.{gate,up,down}_proj.weight`, `mlp.shared_expert(s).{gate,up,down}_proj.weight`.

    FP8 weights need their scale beside them, in `*_proj.weight_scale_inv` or `*_proj.weight_scale`:
    of blocks of 128 x 128, of the whole tensor, or `[rows]` or `[rows, 1]`. A module of FP8 planes
    takes e4m3 weights with scales of blocks or of the tensor as they are; other weights it
    quantises expert by expert.

    Args:
      moe: the module; its sizes and dtypes decide what is expected.
      tensors: arrays of NumPy, JAX or torch by name; or an open safetensors file; or the path of
        one, or of a folder of them.
      prefix: what stands before `mlp.`, such as `model.layers.3.`.
      ignore: shell patterns of names after the prefix that are left out, such as
        `"mlp.experts.*.input_scale"`.

    Raises:
      ValueError, TypeError: a tensor under `prefix + "mlp."` that is missing, is not used or has
        another shape or dtype; a stacked module. The module is then as it was.
    """
    num_stacked = fits.stack_size(moe)
    if num_stacked is not None:
        raise ValueError(
            f"the MoE is stacked over {num_stacked} layers; load each layer's own module, and "
            "stack their states"
        )
    block = _Block(moe, open_tensors(tensors), prefix + BLOCK, prefix, ignore)
    sources = block.find()
    values = {row.variable: block.read(row, names) for row, names in sources}
    for name, value in values.items():
        _assign(getattr(moe, name), value)


class _Block:
    """The tensors of one block, and which of them a module takes."""

    def __init__(self, moe, tensors, stem, prefix, ignore):
        self.moe, self.tensors, self.stem, self.prefix = moe, tensors, stem, prefix
        is_left_out = lambda name: any(fnmatch.fnmatchcase(name, p) for p in ignore)  # noqa: E731
        self.names = {
            name.removeprefix(stem)
            for name in tensors
            if name.startswith(stem) and not is_left_out(name.removeprefix(prefix))
        }

    def find(self) -> list[tuple[Row, list[str]]]:
        """The rows that the module has, with the names of each expert's tensor.

        Raises ValueError for tensors that are missing or left over.
        """
        found, missing, used = [], [], set()
        for row in LAYOUT:
            if getattr(self.moe, row.variable, None) is None:
                continue
            pattern = next((n for n in row.names if n.format(expert=0) in self.names), row.names[0])
            names = self._expand(pattern)
            missing += [name for name in names if name not in self.names]
            used |= {name for each in names for name in (each, self._scale_of(each)) if name}
            found.append((row, names))
        if missing:
            raise self._missing(missing)
        left = sorted(self.names - used, key=_natural)
        if left:
            raise self._left_over(left)
        return found

    def _expand(self, pattern):
        if "{expert}" not in pattern:
            return [pattern]
        return [pattern.format(expert=e) for e in range(self.moe.num_experts)]

    def _scale_of(self, name) -> str | None:
        """The name of the scale beside an FP8 tensor, None without one."""
        stem = name.removesuffix("weight")
        names = [stem + scale for scale in SCALES if stem + scale in self.names]
        return names[0] if names and name.endswith("weight") else None

    def read(self, row: Row, names: list[str]) -> np.ndarray:
        """The value of a row's variable."""
        variable = getattr(self.moe, row.variable)
        shape, dtype = tuple(variable.get_value().shape), variable.get_value().dtype
        if row.variable not in _PLANES:
            return self._read_values(names[0], shape).astype(dtype)
        wide = (self.moe.intermediate_size, self.moe.hidden_size)
        of_expert = wide if row.variable != "down" else wide[::-1]
        value = np.empty(shape, dtype)
        for expert, name in enumerate(names):
            if self.moe.weight_dtype is None:
                value[expert] = self._read_values(name, of_expert).astype(dtype)
            else:
                value[expert] = self._read_fp8_plane(name, of_expert)
        return value

    def _get(self, name, shape) -> np.ndarray:
        array = as_numpy(self.stem + name, self.tensors[self.stem + name])
        if array.dtype not in (*_FLOATS, *_FP8):
            raise TypeError(
                f"{self.stem}{name} is {array.dtype}, expected floats; dequantise the tensors first"
            )
        if array.shape != shape:
            raise ValueError(f"{self.stem}{name} has shape {array.shape}, expected {shape}")
        return array

    def _read_values(self, name, shape) -> np.ndarray:
        """The values in f32, or as they are where the checkpoint has floats of 16 bits."""
        array = self._get(name, shape)
        if array.dtype in _FP8:
            return array.astype(np.float32) * _spread(self._read_scale(name, shape), shape)
        if self._scale_of(name):
            raise TypeError(
                f"{self.stem}{self._scale_of(name)} is the scale of FP8 weights, but "
                f"{self.stem}{name} is {array.dtype}; leave the scale out by ignore= if the "
                "weights have it in them already"
            )
        return array.astype(np.float32) if array.dtype == np.float64 else array

    def _read_fp8_plane(self, name, shape) -> np.ndarray:
        """The expert's plane of `quantize_fp8`; e4m3 blocks keep their bits."""
        array = self._get(name, shape)
        if array.dtype == _FP8[0]:
            scale = self._read_scale(name, shape)
            if scale.shape == _grid(shape) or scale.size == 1:
                return _pack(array, np.broadcast_to(scale, _grid(shape)))
        values = self._read_values(name, shape)
        plane = values if values.dtype == ml_dtypes.bfloat16 else values.astype(np.float32)
        return np.asarray(fp8.quantize_plane(plane))

    def _read_scale(self, name, shape) -> np.ndarray:
        """f32, of one of the shapes `[]`, `[rows, 1]` and that of the grid of blocks."""
        of = self._scale_of(name)
        if of is None:
            raise ValueError(
                f"{self.stem}{name} is FP8 without a scale: neither "
                f"{' nor '.join(self.stem + name.removesuffix('weight') + s for s in SCALES)} is "
                "there; give it, or dequantise the tensor first"
            )
        array = as_numpy(self.stem + of, self.tensors[self.stem + of])
        if array.dtype not in (*_FLOATS, np.dtype(ml_dtypes.float8_e8m0fnu)):
            raise TypeError(f"{self.stem}{of} is {array.dtype}, expected a float scale")
        array, grid = array.astype(np.float32), _grid(shape)
        if array.size == 1:
            return array.reshape(())
        if len(shape) == 2 and array.shape in ((shape[0],), (shape[0], 1)):
            return array.reshape(-1, 1)
        if array.shape != grid:
            raise ValueError(
                f"{self.stem}{of} has shape {array.shape}, expected {grid} for the blocks of "
                f"{fp8.BLOCK} x {fp8.BLOCK} of {shape}, or (1,) or ({shape[0]}, 1)"
            )
        return array

    def _missing(self, names) -> ValueError:
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        if self.names:
            held = f'the tensors under "{self.stem}" are {_summary(self.names)}'
        else:
            held = (
                f'no tensor\'s name begins with "{self.stem}"; names are {_summary(self.tensors)}'
            )
        return ValueError(f"{self.stem}{names[0]} is missing{more}; {held}")

    def _left_over(self, names) -> ValueError:
        experts = [int(m[1]) for n in names if (m := re.match(r"experts\.(\d+)\.", n))]
        if experts and max(experts) >= self.moe.num_experts:
            return ValueError(
                f"the checkpoint has expert {max(experts)} ({self.stem}experts.{max(experts)}.*), "
                f"the MoE has num_experts={self.moe.num_experts}; make it with num_experts="
                f"{1 + max(experts)}"
            )
        reasons = []
        for name in names:
            reasons += [
                remedy
                for pattern, applies, remedy in REMEDIES
                if fnmatch.fnmatchcase(name, pattern) and applies(self.moe)
            ][:1]
        remedy = "; ".join([*dict.fromkeys(reasons), "or leave them out by ignore="])
        listed = ", ".join(self.stem + name for name in names[:_MOST_NAMES])
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        return ValueError(f"the MoE has no place for {listed}{more}: {remedy}")


def _natural(name):
    """Numbers in names in their order."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _summary(names) -> str:
    """Names with runs of numbers drawn together: `experts.{0..7}.w1.weight`."""
    groups: dict[str, list[list[str]]] = {}
    for name in sorted(names, key=_natural):
        kind = re.sub(_NUMBER, "{}", name.replace("{", "{{").replace("}", "}}"))
        groups.setdefault(kind, []).append(re.findall(_NUMBER, name))
    texts = [
        kind.format(*(_run(sorted({int(n) for n in column})) for column in zip(*rows, strict=True)))
        for kind, rows in groups.items()
    ]
    more = f" and {len(texts) - _MOST_NAMES} more kinds" if len(texts) > _MOST_NAMES else ""
    return (", ".join(texts[:_MOST_NAMES]) or "none") + more


def _run(numbers) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{{{numbers[0]}..{numbers[-1]}}}"


def _grid(shape) -> tuple[int, ...]:
    """Blocks of 128 x 128 of a matrix."""
    return tuple(-(-size // fp8.BLOCK) for size in shape)


def _spread(scale, shape) -> np.ndarray:
    """Scales for each value, or what broadcasts to them."""
    if scale.ndim == 0 or (scale.shape[1:] == (1,) and scale.shape[0] == shape[0]):
        return scale
    wide = np.repeat(np.repeat(scale, fp8.BLOCK, 0), fp8.BLOCK, 1)
    return wide[: shape[0], : shape[1]]


def _pack(values, scales) -> np.ndarray:
    """Bytes of a plane, `[bytes] u8`, of e4m3 values and their blocks' scales."""
    rows, columns = values.shape
    plane = np.zeros(fp8.plane_bytes(rows, columns), np.uint8)
    plane[: values.size] = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
    first = fp8.value_bytes(rows, columns)
    of_scales = np.ascontiguousarray(scales, np.float32).view(np.uint8).reshape(-1)
    plane[first : first + of_scales.size] = of_scales
    return plane


def _assign(variable, value):
    """Replaces a variable's value, keeping its sharding."""
    old = variable.get_value()
    sharding = getattr(old, "sharding", None)
    variable.set_value(jax.device_put(value, sharding))
