"""Weights in float32, tokens too."""

from jax_iser.experts.formats.base import ElementFormat

FORMAT = ElementFormat("float32", index=0, element_bits=32)
