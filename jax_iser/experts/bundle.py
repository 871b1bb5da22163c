"""What an expert is made of: the planes of a bundle, as ffi/core/bundle.h describes them."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax_iser.experts.formats.base import WeightFormat

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
      num_bytes: of one expert, scales included.
      scales_offset: where the scales begin in it; `num_bytes` where there are none.
      array_shape: of one expert in the user's array: `shape`, or `(num_bytes,)`.
      array_dtype: of the user's array.
      offset: where it begins in a helper slot, in bytes; a multiple of 128.
    """

    name: str
    shape: tuple[int, ...]
    element_bits: int
    scale_block: int
    num_bytes: int
    scales_offset: int
    array_shape: tuple[int, ...]
    array_dtype: str
    offset: int = 0

    @property
    def num_dims(self) -> int:
        """Axes of the user's array, `[experts, ...]`; one more where layers are stacked."""
        return 1 + len(self.array_shape)


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


def bias_plane(name: str, size: int) -> PlaneLayout:
    """A bias: f32 in every weight format."""
    return PlaneLayout(name, (size,), 32, 0, 4 * size, 4 * size, (size,), "float32")


def bundle_layout(
    weight_format: WeightFormat, hidden: int, intermediate: int, has_biases: bool = False
) -> BundleLayout:
    """The layout of experts with sizes `D` and `I`.

    Example:
      >>> from jax_iser.experts.formats import FORMATS
      >>> layout = bundle_layout(FORMATS["bfloat16"], hidden=96, intermediate=40, has_biases=True)
      >>> layout.num_bytes, [(plane.name, plane.offset) for plane in layout.planes[2:4]]
      (23936, [('down', 15360), ('gate_bias', 23040)])
    """
    wide, tall = (intermediate, hidden), (hidden, intermediate)
    shapes = zip(PLANES, (wide, wide, tall), strict=False)
    planes = [weight_format.plane(name, *shape) for name, shape in shapes]
    if has_biases:
        sizes = (intermediate, intermediate, hidden)
        named = zip(PLANES[NUM_WEIGHT_PLANES:], sizes, strict=True)
        planes += [bias_plane(name, size) for name, size in named]
    placed, num_bytes = [], 0
    for plane in planes:
        placed.append(dataclasses.replace(plane, offset=num_bytes))
        num_bytes = align_up(num_bytes + plane.num_bytes, PLANE_ALIGN)
    return BundleLayout(tuple(placed), num_bytes)
