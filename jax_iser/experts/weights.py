"""The arrays of expert weights that users hold."""

from __future__ import annotations

from typing import NamedTuple

import jax


class ExpertWeights(NamedTuple):
    """Expert weights of one device's ranks, or of all ranks outside `shard_map`.

    Attributes:
      gate, up: `[H, I, D]` per rank, each expert contiguous; stacked `[L, H, I, D]` with `layer`.
      down: `[H, D, I]`, stacked `[L, H, D, I]`.
      gate_bias, up_bias: `[H, I] f32`, stacked `[L, H, I]`; None for experts without biases.
      down_bias: `[H, D] f32`, stacked `[L, H, D]`; None likewise. All three or none are given.

    As `quantize_fp8` makes them gate, up and down are `[H, bytes] u8`, stacked `[L, H, bytes]`.
    """

    gate: jax.Array
    up: jax.Array
    down: jax.Array
    gate_bias: jax.Array | None = None
    up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None

    @property
    def biases(self) -> tuple[jax.Array, ...]:
        """Biases of gate, up and down, or `()`.

        Raises:
          ValueError: some biases are given, others None.
        """
        biases = {"gate_bias": self.gate_bias, "up_bias": self.up_bias, "down_bias": self.down_bias}
        given = tuple(bias for bias in biases.values() if bias is not None)
        if len(given) not in (0, len(biases)):
            missing = [name for name, bias in biases.items() if bias is None]
            raise ValueError(
                f"{', '.join(missing)} of the experts is None beside other biases; give all three, "
                "zeros where an expert has none, or leave all out"
            )
        return given

    @property
    def planes(self) -> tuple[jax.Array, ...]:
        """The arrays that are there, in the order of the calls' operands."""
        return (self.gate, self.up, self.down, *self.biases)

    def of_layer(self, layer, gate_dims: int) -> ExpertWeights:
        """One layer of weights that may be stacked; unstacked gates have `gate_dims` axes."""
        if self.gate.ndim == gate_dims:
            return self
        return ExpertWeights(*(plane[layer] for plane in self.planes))
