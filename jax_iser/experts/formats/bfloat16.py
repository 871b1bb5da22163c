"""Weights in bfloat16, tokens too."""

from jax_iser.experts.formats.base import ElementFormat

FORMAT = ElementFormat("bfloat16", index=1, element_bits=16)
