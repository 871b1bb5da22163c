"""`load_hf`: one MoE block of a checkpoint with Hugging Face's names, all of it or nothing.

`layouts.LAYOUT` says where each variable comes from. Every tensor of the block is used, left out by
`ignore=`, or named in an error.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jax_iser.experts.bundle import PLANES
from jax_iser.experts.formats import float8_block128 as fp8
from jax_iser.experts.formats import format_of
from jax_iser.nnx import fits
from jax_iser.nnx.layouts import (
    BLOCKS,
    GATE_UP_ORDERS,
    LAYOUT,
    REMEDIES,
    FusedLayout,
    Row,
    Source,
    fused_layout,
    part_of,
)
from jax_iser.nnx.moe import MoE
from jax_iser.nnx.tensors import SafetensorsHandle, as_numpy, open_tensors

SCALES = ("weight_scale_inv", "weight_scale")  # both multiply the values
_FP8 = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))
_FLOATS = (*map(np.dtype, ("float64", "float32", "float16")), np.dtype(ml_dtypes.bfloat16))
_MOST_NAMES = 12
_NUMBER = r"(?<=\.)\d+(?=\.)"  # of an expert or a layer, in a name


def load_hf(
    moe: MoE,
    tensors: Mapping[str, Any] | SafetensorsHandle | str | os.PathLike,
    prefix: str = "",
    *,
    ignore: Sequence[str] = (),
    gate_up_order: str | None = None,
) -> None:
    """Loads one MoE block from tensors with Hugging Face names: all of it, or nothing.

    Names after the prefix and `mlp.` or `block_sparse_moe.`:

    - `gate.weight` or `router.weight` `[E, D]`, `gate.bias` or `router.bias` `[E]`,
      `gate.e_score_correction_bias` `[E]`;
    - `experts.N.{gate,up,down}_proj.weight`, or Mixtral's `experts.N.{w1,w3,w2}.weight`, and
      `experts.N.{gate,up,down}_proj.bias`;
    - or all experts in one: `experts.gate_up_proj` `[E, 2I, D]` and `experts.down_proj`
      `[E, D, I]`, gate before up; or transposed as in gpt-oss, `[E, D, 2I]` and `[E, I, D]`, gate
      and up interleaved; `experts.gate_up_proj_bias` `[E, 2I]`, `experts.down_proj_bias` `[E, D]`;
    - `shared_expert(s).{gate,up,down}_proj.weight`, `shared_expert_gate.weight` `[1, D]`.

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
      gate_up_order: of `gate_up_proj`: `"halves"`, `"interleaved"`, or None: by its shape and
        biases. Needed for transposed tensors without biases, which models store either way.

    Raises:
      ValueError, TypeError: a tensor of the block that is missing, is not used or has another shape
        or dtype; a stacked module. The module is then as it was.
    """
    num_stacked = fits.stack_size(moe)
    if num_stacked is not None:
        raise ValueError(
            f"the MoE is stacked over {num_stacked} layers; load each layer's own module, and "
            "stack their states"
        )
    if gate_up_order not in (None, *GATE_UP_ORDERS):
        raise ValueError(f"gate_up_order={gate_up_order!r} is not one of {GATE_UP_ORDERS}, or None")
    tensors = open_tensors(tensors)
    block = _Block(moe, tensors, _stem_of(tensors, prefix), prefix, ignore, gate_up_order)
    sources = block.find()
    values = {row.variable: block.read(row, source, names) for row, source, names in sources}
    for name, value in values.items():
        _assign(getattr(moe, name), value)


def _stem_of(tensors, prefix) -> str:
    """The prefix with the block's own name."""
    found = [
        prefix + block for block in BLOCKS if any(n.startswith(prefix + block) for n in tensors)
    ]
    if len(found) > 1:
        raise ValueError(
            f'names begin with "{found[0]}" and with "{found[1]}": one MoE has one block; pass the '
            "tensors of one"
        )
    return found[0] if found else prefix + BLOCKS[0]


class _Block:
    """The tensors of one block, and which of them a module takes."""

    def __init__(self, moe, tensors, stem, prefix, ignore, gate_up_order):
        self.moe, self.tensors, self.stem, self.prefix = moe, tensors, stem, prefix
        self.gate_up_order = gate_up_order
        self.format = format_of(moe.weight_format, "float32")
        self.fused: dict[str, np.ndarray] = {}  # read once, for gate and for up
        self.fused_layout = FusedLayout(False, False)
        is_left_out = lambda name: any(fnmatch.fnmatchcase(name, p) for p in ignore)  # noqa: E731
        self.names = {
            name.removeprefix(stem)
            for name in tensors
            if name.startswith(stem) and not is_left_out(name.removeprefix(prefix))
        }

    def find(self) -> list[tuple[Row, Source, list[str]]]:
        """The rows that the module has, where each comes from, and the names of its tensors.

        Raises ValueError for tensors that are missing or left over.
        """
        found, missing, used = [], [], set()
        for row in LAYOUT:
            if getattr(self.moe, row.variable, None) is None:
                continue
            expanded = [(source, self._expand(source.name)) for source in row.sources]
            held = (each for each in expanded if not self.names.isdisjoint(each[1]))
            source, names = next(held, expanded[0])
            missing += [name for name in names if name not in self.names]
            used |= {name for each in names for name in (each, self._scale_of(each)) if name}
            found.append((row, source, names))
        if missing:
            raise self._missing(missing)
        left = sorted(self.names - used, key=_natural)
        if left:
            raise self._left_over(left)
        self._read_fused([names[0] for _, source, names in found if source.is_fused])
        return found

    def _read_fused(self, names):
        for name in names:
            if name not in self.fused:
                self.fused[name] = as_numpy(self.stem + name, self.tensors[self.stem + name])
                self._check_fused(name)
        sizes = (self.moe.num_experts, self.moe.hidden_size, self.moe.intermediate_size)
        self.fused_layout = fused_layout(self.fused, self.stem, sizes, self.gate_up_order)

    def _check_fused(self, name):
        if self.fused[name].dtype not in _FLOATS:
            raise TypeError(
                f"{self.stem}{name} is {self.fused[name].dtype}, expected floats of 16 bits or "
                "more; dequantise the tensors first, or give those of single experts beside their "
                "scales"
            )

    def _expand(self, pattern):
        if "{expert}" not in pattern:
            return [pattern]
        return [pattern.format(expert=e) for e in range(self.moe.num_experts)]

    def _scale_of(self, name) -> str | None:
        """The name of the scale beside an FP8 tensor, None without one."""
        stem = name.removesuffix("weight")
        names = [stem + scale for scale in SCALES if stem + scale in self.names]
        return names[0] if names and name.endswith("weight") else None

    def read(self, row: Row, source: Source, names: list[str]) -> np.ndarray:
        """The value of a row's variable."""
        old = getattr(self.moe, row.variable).get_value()
        shape, dtype = tuple(old.shape), old.dtype
        if row.variable not in PLANES:
            return self._read_values(names[0], shape).astype(dtype)
        plane = next(p for p in self.moe.layout().planes if p.name == row.variable)
        is_packed = plane.array_shape != plane.shape
        value = np.empty(shape, dtype)
        for expert in range(self.moe.num_experts):
            if source.is_fused:
                part = self._read_part(names[0], expert, source.half, plane.shape)
            elif is_packed:
                value[expert] = self._read_fp8_plane(names[expert], plane.shape)
                continue
            else:
                part = self._read_values(names[expert], plane.shape)
            value[expert] = self._pack(part) if is_packed else part.astype(dtype)
        return value

    def _read_part(self, name, expert, half, shape) -> np.ndarray:
        """One expert's values of a fused tensor."""
        array = self.fused[name]
        rows = shape[0] if half is None else 2 * shape[0]
        if len(shape) == 1 and array.shape != (self.moe.num_experts, rows):
            raise ValueError(
                f"{self.stem}{name} has shape {array.shape}, expected "
                f"{(self.moe.num_experts, rows)}"
            )
        part = part_of(array[expert], half, self.fused_layout)
        return part.astype(np.float32) if part.dtype == np.float64 else part

    def _pack(self, values) -> np.ndarray:
        plane = values if values.dtype == ml_dtypes.bfloat16 else values.astype(np.float32)
        return np.asarray(self.format.pack(plane))

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
        return self._pack(self._read_values(name, shape))

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
