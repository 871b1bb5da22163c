"""What the products of experts take, in JAX and in NumPy alike."""

from __future__ import annotations

import dataclasses

import numpy as np

from jax_iser.experts.activation import Activation
from jax_iser.experts.bundle import bundle_layout
from jax_iser.experts.formats import FORMATS, WeightFormat, format_of


@dataclasses.dataclass(frozen=True)
class Expert:
    """What is static of an expert: how its weights are stored, and its activation."""

    weight_format: str
    activation: Activation

    @classmethod
    def of(cls, weight_format, activation, dtype) -> Expert:
        return cls(format_of(weight_format, dtype).name, Activation.of(activation))

    @property
    def format(self) -> WeightFormat:
        return FORMATS[self.weight_format]


def check_fused_moe_arguments(x, topk_ids, topk_weights, weights, expert) -> None:
    """Raises ValueError or TypeError, naming both values, for operands that do not fit."""
    if x.ndim != 2:
        raise ValueError(f"x has shape {x.shape}, expected [tokens, hidden]; reshape it first")
    if topk_ids.ndim != 2 or topk_ids.shape[0] != x.shape[0]:
        raise ValueError(f"topk_ids has shape {topk_ids.shape}, expected ({x.shape[0]}, top_k)")
    if topk_weights.shape != topk_ids.shape:
        raise ValueError(
            f"topk_weights has shape {topk_weights.shape}, topk_ids {topk_ids.shape}: "
            "one weight a route"
        )
    if not np.issubdtype(topk_ids.dtype, np.integer):
        raise TypeError(f"topk_ids has dtype {topk_ids.dtype}, expected int32")
    _check_planes(x, weights, expert.format)


def _check_planes(x, weights, weight_format):
    weight_format.check_dtype(str(x.dtype))
    hidden, gate = x.shape[1], weights.gate
    weight_format.check_sizes(hidden, 0, "the hidden size", "")
    plane = weight_format.plane("gate", 1, hidden)
    _check_dtype("gate", gate, plane, weight_format)
    fits = gate.ndim == plane.num_dims
    intermediate = weight_format.intermediate_of(gate, hidden) if fits else 0
    if not intermediate:
        raise ValueError(
            f"gate has shape {gate.shape}, expected planes [intermediate, {hidden}] of "
            f"weight_format={weight_format.name!r} for each expert, for x {x.shape}"
        )
    layout = bundle_layout(weight_format, hidden, intermediate, bool(weights.biases))
    for array, plane in zip(weights.planes, layout.planes, strict=True):
        _check_dtype(plane.name, array, plane, weight_format)
        expected = (gate.shape[0], *plane.array_shape)
        if array.shape != expected:
            raise ValueError(
                f"{plane.name} has shape {array.shape}, expected {expected} beside gate "
                f"{gate.shape}"
            )


def _check_dtype(name, array, plane, weight_format):
    if array.dtype == np.dtype(plane.array_dtype):
        return
    remedy = "cast it"
    if plane.array_dtype == "uint8":
        remedy = "convert the weights by quantize_fp8"
    elif array.dtype == np.uint8:
        remedy = 'pass weight_format="float8_block128" if these are planes of quantize_fp8'
    raise TypeError(
        f"{name} has dtype {array.dtype}, expected {plane.array_dtype} for weight_format="
        f"{weight_format.name!r} beside x; {remedy}"
    )
