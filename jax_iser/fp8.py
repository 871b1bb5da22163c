"""FP8 weights by the names that they have had: see jax_iser/experts/formats/float8_block128.py."""

from jax_iser.experts.formats.float8_block128 import BLOCK as BLOCK
from jax_iser.experts.formats.float8_block128 import MAX as MAX
from jax_iser.experts.formats.float8_block128 import MIN_AMAX as MIN_AMAX
from jax_iser.experts.formats.float8_block128 import NAME as NAME
from jax_iser.experts.formats.float8_block128 import check_sizes as check_sizes
from jax_iser.experts.formats.float8_block128 import dequantize_fp8 as dequantize_fp8
from jax_iser.experts.formats.float8_block128 import intermediate_of as intermediate_of
from jax_iser.experts.formats.float8_block128 import plane_bytes as plane_bytes
from jax_iser.experts.formats.float8_block128 import quantize_fp8 as quantize_fp8
from jax_iser.experts.formats.float8_block128 import quantize_plane as quantize_plane
from jax_iser.experts.formats.float8_block128 import quantize_rows as quantize_rows
from jax_iser.experts.formats.float8_block128 import split_plane as split_plane
from jax_iser.experts.formats.float8_block128 import value_bytes as value_bytes
