"""Formats of expert weights: one file per format, one entry here."""

from __future__ import annotations

from jax_iser.experts.formats import bfloat16, float8_block128, float32
from jax_iser.experts.formats.base import WeightFormat

# By name, in the order of ffi/core/bundle.h.
_FORMATS: tuple[WeightFormat, ...] = (float32.FORMAT, bfloat16.FORMAT, float8_block128.FORMAT)
FORMATS = {each.name: each for each in _FORMATS}
TOKEN_FORMATS = ("float32", "bfloat16", "float8_row128")  # in the order of ffi/core/bundle.h
WEIGHT_DTYPES = {each.weight_dtype: each for each in FORMATS.values() if each.weight_dtype}


def format_of(weight_format: str | None, dtype, weight_dtype: str | None = None) -> WeightFormat:
    """The format that is asked for.

    Args:
      weight_format: a name of `FORMATS`, or None.
      dtype: of the tokens: the format where nothing else names one.
      weight_dtype: None, or the alias of a format.

    Raises:
      ValueError: an unknown name, or two that contradict each other.

    Example:
      >>> format_of(None, "bfloat16").name, format_of(None, "bfloat16", "float8_e4m3fn").name
      ('bfloat16', 'float8_block128')
    """
    if weight_dtype is not None and weight_dtype not in WEIGHT_DTYPES:
        raise ValueError(
            f"weight_dtype={weight_dtype!r} is neither None, for weights of dtype, nor "
            + " or ".join(map(repr, WEIGHT_DTYPES))
        )
    named = None if weight_dtype is None else WEIGHT_DTYPES[weight_dtype].name
    name = weight_format or named or str(dtype)
    if name not in FORMATS:
        raise ValueError(f"weight_format={name!r} is not one of {', '.join(FORMATS)}")
    if named not in (None, name):
        raise ValueError(
            f'weight_format="{name}" and weight_dtype="{weight_dtype}", which means '
            f'weight_format="{named}", contradict each other; pass one of them'
        )
    return FORMATS[name]
