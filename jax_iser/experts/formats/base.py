"""What a weight format has to say: one object per format, in a file of its own beside this one."""

from __future__ import annotations

from typing import Protocol

import jax.numpy as jnp

from jax_iser.experts.bundle import PlaneLayout


class WeightFormat(Protocol):
    """How the weights of experts are stored, and how the plain JAX of the layer computes with them.

    Attributes:
      name: as a Domain's `weight_format`.
      index: as ffi/core/bundle.h counts the formats.
      weight_dtype: the `weight_dtype` that is an alias of the format; None for formats of elements.
      token_format: what tokens are dispatched in.
      has_gradient: whether gradients reach the weights; where they do not, those of the rest are
        taken on `values`.
    """

    name: str
    index: int
    weight_dtype: str | None
    token_format: str
    has_gradient: bool

    def check_sizes(
        self, hidden: int, intermediate: int, hidden_name: str, intermediate_name: str
    ) -> None:
        """Raises ValueError, with the remedy, for sizes that the format does not take."""

    def check_dtype(self, dtype: str) -> None:
        """Raises ValueError, with the remedy, for a dtype of tokens that does not go with it."""

    def plane(self, name: str, rows: int, columns: int) -> PlaneLayout:
        """The layout of one expert's plane, without its offset."""

    def intermediate_of(self, gate, hidden: int) -> int:
        """`I` of an array of gate planes beside `D`; 0 where there is none."""

    def values(self, plane, rows: int, columns: int):
        """The numbers that planes `[..., *array_shape]` stand for, `[..., rows, columns]`."""

    def pack(self, values):
        """The array that users hold of values `[..., rows, columns]` in bf16 or f32."""

    def expert_mlp(self, rows, planes, biases, activation, is_route):
        """`[n, rows, D]` through one expert each; planes `[n, *array_shape]`, biases `[n, size]`.

        Rows outside `is_route [n, rows, 1] bool` are filler and zero. Their products are masked
        too: a zero cotangent times a weight that is not finite would be NaN in the backward pass.
        """


class ElementFormat:
    """Weights in elements of the tokens' own type, row by row."""

    weight_dtype: str | None = None
    has_gradient = True

    def __init__(self, name: str, index: int, element_bits: int):
        self.name = self.token_format = name
        self.index, self.element_bits = index, element_bits

    def check_sizes(
        self, hidden: int, intermediate: int, hidden_name: str, intermediate_name: str
    ) -> None:
        """Any size will do."""

    def check_dtype(self, dtype: str) -> None:
        if dtype != self.name:
            raise ValueError(
                f'weight_format="{self.name}" with dtype="{dtype}": weights of elements have the '
                f'dtype of the tokens; pass dtype="{self.name}", or leave weight_format out'
            )

    def plane(self, name: str, rows: int, columns: int) -> PlaneLayout:
        shape, num_bytes = (rows, columns), rows * columns * self.element_bits // 8
        return PlaneLayout(
            name, shape, self.element_bits, 0, num_bytes, num_bytes, shape, self.name
        )

    def intermediate_of(self, gate, hidden: int) -> int:
        fits = gate.ndim >= 2 and gate.shape[-1] == hidden
        return gate.shape[-2] if fits else 0

    def values(self, plane, rows, columns):
        return plane

    def pack(self, values):
        return values

    def expert_mlp(self, rows, planes, biases, activation, is_route):
        gate, up, down = planes
        dot = lambda a, w: jnp.einsum("nrd,nid->nri", a, w, preferred_element_type=jnp.float32)  # noqa: E731
        gated, linear = dot(rows, gate), dot(rows, up)
        if biases:
            gated, linear = gated + biases[0][:, None], linear + biases[1][:, None]
        gated, linear = (jnp.where(is_route, product, 0.0) for product in (gated, linear))
        outputs = dot(activation(gated, linear).astype(rows.dtype), down)
        if biases:
            outputs = outputs + biases[2][:, None]
        return outputs.astype(rows.dtype)
