"""FP8 weights: e4m3 values with an f32 scale for each block of 128 x 128 (ffi/core/fp8.h).

`scale = amax / 448`, `value = e4m3(x * (448 / amax))`, amax at least 2^-100, all in f32 and to
nearest even. Here it is done by integers where XLA's own conversion or division may round otherwise
on some platform, so that every platform has the bits of NumPy and of the kernels.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BLOCK = 128
MAX = 448.0
MIN_AMAX = 2.0**-100
NAME = "float8_e4m3fn"  # as a Domain's `weight_dtype`


def plane_bytes(rows: int, columns: int) -> int:
    """Bytes of a plane `[rows, columns]` of one expert: values, then scales, each padded."""
    scales = 4 * -(-rows // BLOCK) * -(-columns // BLOCK)
    return _round_up(value_bytes(rows, columns) + scales, 128)


def value_bytes(rows: int, columns: int) -> int:
    """Where the scales begin in a plane."""
    return _round_up(rows * columns, 16)


def _round_up(value, step):
    return -(-value // step) * step


def is_fp8(plane) -> bool:
    """Whether a plane of expert weights is made of FP8's bytes."""
    return plane.dtype == np.uint8


def is_stacked(plane) -> bool:
    """Whether a plane has a leading layer axis."""
    return plane.ndim == (3 if is_fp8(plane) else 4)


def check_sizes(hidden: int, intermediate: int, hidden_name: str, intermediate_name: str) -> None:
    """Raises ValueError for sizes of experts that computations with FP8 do not take."""
    for name, size in ((hidden_name, hidden), (intermediate_name, intermediate)):
        if size % BLOCK:
            raise ValueError(
                f"{name}={size} is not a multiple of {BLOCK}, as {NAME} weights need; pad the "
                f"experts with zeros to {_round_up(size, BLOCK)}"
            )


def intermediate_of(num_bytes: int, hidden: int) -> int:
    """`I` of planes of so many bytes an expert beside `D`; 0 where there is none."""
    blocks = num_bytes // (BLOCK * BLOCK + 4)
    intermediate = blocks * BLOCK * BLOCK // hidden
    return intermediate if plane_bytes(hidden, intermediate) == num_bytes else 0


def quantize_fp8(weights):
    """Expert weights as FP8 planes, for a Domain with `weight_dtype="float8_e4m3fn"`.

    Meant for load time: once, and under `jax.jit` with the shardings that the weights have. Planes
    of one expert stay on its device.

    Args:
      weights: `ExpertWeights` of bf16 or f32: gate, up `[..., H, I, D]`, down `[..., H, D, I]`.

    Returns:
      `ExpertWeights` of `[..., H, bytes] u8`: the e4m3 values of an expert's plane, padded to a
      multiple of 16 bytes, then the f32 scales of its blocks of 128 x 128, `[ceil(rows / 128),
      ceil(columns / 128)]`, padded to a multiple of 128 bytes. A NaN stays one and leaves the
      other values of its block alone; an infinity makes its whole block NaN.

    Raises:
      ValueError, TypeError: planes of fewer than two dimensions, or of another dtype.

    Example:
      >>> planes = (jnp.ones((8, 256, 128)), jnp.ones((8, 256, 128)), jnp.ones((8, 128, 256)))
      >>> quantize_fp8(ExpertWeights(*planes)).gate.shape
      (8, 32896)
    """
    return weights._replace(
        **{name: quantize_plane(plane, name) for name, plane in weights._asdict().items()}
    )


def quantize_plane(plane, name="plane") -> jax.Array:
    """One plane of `quantize_fp8`: `[..., rows, columns]` to `[..., bytes] u8`."""
    if plane.dtype not in (jnp.bfloat16, jnp.float32):
        raise TypeError(f"{name} is {plane.dtype}, expected bfloat16 or float32; cast it")
    if plane.ndim < 2:
        raise ValueError(f"{name} has shape {plane.shape}, expected [..., rows, columns]")
    return _quantize_plane(plane)


@jax.jit
def _quantize_plane(plane):
    *lead, rows, columns = plane.shape
    pad = [(0, 0)] * len(lead) + [(0, -rows % BLOCK), (0, -columns % BLOCK)]
    blocks = jnp.pad(plane.astype(jnp.float32), pad)
    padded = blocks.shape[-2:]
    blocks = blocks.reshape(*lead, padded[0] // BLOCK, BLOCK, padded[1] // BLOCK, BLOCK)
    up, down = _scales(_amax(blocks, (-3, -1)))
    codes = _to_e4m3(blocks * up[..., :, None, :, None]).reshape(*lead, *padded)
    codes = codes[..., :rows, :columns].reshape(*lead, rows * columns)
    down = lax.bitcast_convert_type(down.reshape(*lead, down.shape[-2] * down.shape[-1]), jnp.uint8)
    down = down.reshape(*lead, down.shape[-2] * 4)
    codes = _pad_to(codes, value_bytes(rows, columns))
    return _pad_to(jnp.concatenate([codes, down], -1), plane_bytes(rows, columns))


def _pad_to(array, size):
    return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, size - array.shape[-1])])


def dequantize_fp8(plane: jax.Array, rows: int, columns: int) -> jax.Array:
    """The values of FP8 planes, `value * scale` in f32.

    Args:
      plane: `[..., bytes] u8`, a plane of `quantize_fp8`.
      rows, columns: of an expert's plane: `I, D` of gate and up, `D, I` of down.

    Returns:
      `[..., rows, columns] f32`.

    Raises:
      ValueError, TypeError: a plane of another size or dtype.
    """
    values, scales = split_plane(plane, rows, columns)
    scales = jnp.repeat(jnp.repeat(scales, BLOCK, -2), BLOCK, -1)
    return values.astype(jnp.float32) * scales[..., :rows, :columns]


def split_plane(plane, rows, columns) -> tuple[jax.Array, jax.Array]:
    """Values `[..., rows, columns] e4m3` and scales `[..., row blocks, column blocks] f32`."""
    if not is_fp8(plane):
        raise TypeError(f"plane is {plane.dtype}, expected uint8 as quantize_fp8 makes it")
    if plane.ndim < 1 or plane.shape[-1] != plane_bytes(rows, columns):
        raise ValueError(
            f"plane has shape {plane.shape}, expected [..., {plane_bytes(rows, columns)}] for "
            f"{rows} rows of {columns} columns"
        )
    plane, lead = jnp.asarray(plane), plane.shape[:-1]
    grid = (-(-rows // BLOCK), -(-columns // BLOCK))
    values = plane[..., : rows * columns].reshape(*lead, rows, columns)
    first = value_bytes(rows, columns)
    scales = plane[..., first : first + 4 * grid[0] * grid[1]].reshape(*lead, *grid, 4)
    to_type = lax.bitcast_convert_type
    return to_type(values, jnp.float8_e4m3fn), to_type(scales, jnp.float32)


def quantize_rows(rows) -> tuple[jax.Array, jax.Array]:
    """Rows of activations `[..., columns]`, columns a multiple of 128.

    Returns:
      Values `[..., columns] e4m3`, and `[..., columns / 128] f32` scales.
    """
    grid = (rows.shape[-1] // BLOCK, BLOCK)
    blocks = rows.astype(jnp.float32).reshape(*rows.shape[:-1], *grid)
    up, down = _scales(_amax(blocks, (-1,)))
    codes = _to_e4m3(blocks * up[..., None]).reshape(rows.shape)
    return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn), down


def _amax(blocks, axes):
    """The largest magnitude; a NaN has none."""
    return jnp.max(jnp.where(jnp.isnan(blocks), 0, jnp.abs(blocks)), axes)


def _scales(amax):
    """Of values, `448 / amax`, and of what is stored, `amax / 448`."""
    most = jnp.where(amax > MIN_AMAX, amax, jnp.float32(MIN_AMAX))
    is_infinite = jnp.isinf(most)
    limit = jnp.full_like(most, MAX)
    up = jnp.where(is_infinite, 0, _divide(limit, most))
    return up, jnp.where(is_infinite, jnp.inf, _divide(most, limit))


def _divide(a, b):
    """`a / b` of positive normal f32 with a normal quotient, to nearest.

    By long division of the significands: XLA divides by constants in two roundings, and on GPUs
    anything to within two units in the last place.
    """
    bits = [lax.bitcast_convert_type(operand, jnp.uint32) for operand in (a, b)]
    exponents = [(each >> 23).astype(jnp.int32) for each in bits]
    rest, divisor = ((each & 0x7FFFFF) | 0x800000 for each in bits)
    is_less = rest < divisor
    rest = jnp.where(is_less, rest << 1, rest)
    quotient = jnp.zeros_like(rest)
    for _ in range(25):  # 24 bits and the one that rounds: half way between two f32 none ever is
        fits = rest >= divisor
        rest = jnp.where(fits, rest - divisor, rest) << 1
        quotient = quotient << 1 | fits.astype(jnp.uint32)
    exponent = exponents[0] - exponents[1] - is_less.astype(jnp.int32) + 126
    result = (exponent.astype(jnp.uint32) << 23) + ((quotient + 1) >> 1)
    return lax.bitcast_convert_type(result, jnp.float32)


def _to_e4m3(values):
    """Codes of f32 values: nearest even, beyond 448 to 448, NaN to NaN."""
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    sign, bits = (bits >> 24 & 0x80).astype(jnp.uint8), bits & 0x7FFFFFFF
    magnitude = lax.bitcast_convert_type(bits, jnp.float32)
    small = jnp.round(jnp.minimum(magnitude, 1.0) * 512).astype(jnp.uint32)
    large = ((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - (120 << 3)
    code = jnp.where(bits < 0x3C800000, small, large)  # below 2^-6: multiples of 2^-9
    code = jnp.where(bits >= 0x43E00000, 0x7E, code)
    code = jnp.where(bits > 0x7F800000, 0x7F, code)
    return sign | code.astype(jnp.uint8)
