"""What an expert is made of: the planes of a bundle, as ffi/core/bundle.h describes them."""

from __future__ import annotations

import dataclasses
import math

PLANE_ALIGN = 128
PLANES = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
NUM_WEIGHT_PLANES = 3  # those in the weight format; biases follow them


@dataclasses.dataclass(frozen=True)
class PlaneLayout:
    """One plane of a bundle: the share of one expert in one array that the user holds.

    Attributes:
      name: one of `PLANES`.
      shape: of one expert's values, `(rows, columns)`, or `(columns,)` of a bias.
      element_bits: bits of a value.
      scale_block: 0, or the edge of the square of values that share a scale.
      offset: where it begins in a helper slot, in bytes; a multiple of 128.
      num_bytes: of one expert, scales included.
      scales_offset: where the scales begin in it; `num_bytes` where there are none.
    """

    name: str
    shape: tuple[int, ...]
    element_bits: int
    scale_block: int
    offset: int
    num_bytes: int
    scales_offset: int


@dataclasses.dataclass(frozen=True)
class BundleLayout:
    """The planes of an expert's bundle, in the order of the calls' operands.

    Attributes:
      planes: gate, up and down, then their biases where there are any.
      num_bytes: of a helper slot.
    """

    planes: tuple[PlaneLayout, ...]
    num_bytes: int


def align_up(num_bytes: int, alignment: int) -> int:
    """`num_bytes` rounded up to a multiple of `alignment`."""
    return math.ceil(num_bytes / alignment) * alignment
