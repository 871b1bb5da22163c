"""FP8 weights: e4m3 values with an f32 scale for each block of 128 x 128 (ffi/core/fp8.h).

`scale = amax / 448`, `value = e4m3(x * (448 / amax))`, amax at least 2^-100, all in f32 and to
nearest even. Here it is done by integers where XLA's own conversion or division may round otherwise
on some platform, so that every platform has the bits of NumPy and of the kernels.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_iser.experts.bundle import PlaneLayout, align_up

BLOCK = 128
SIZE_STEP = 64  # sizes of experts are multiples of this; the last block of a row may be half
MAX = 448.0
MIN_AMAX = 2.0**-100
NAME = "float8_e4m3fn"  # as a Domain's `weight_dtype`


def plane_bytes(rows: int, columns: int) -> int:
    """Bytes of a plane `[rows, columns]` of one expert: values, then scales, each padded."""
    scales = 4 * -(-rows // BLOCK) * -(-columns // BLOCK)
    return align_up(value_bytes(rows, columns) + scales, 128)


def value_bytes(rows: int, columns: int) -> int:
    """Where the scales begin in a plane."""
    return align_up(rows * columns, 16)


def check_sizes(hidden: int, intermediate: int, hidden_name: str, intermediate_name: str) -> None:
    """Raises ValueError for sizes of experts that computations with FP8 do not take."""
    for name, size in ((hidden_name, hidden), (intermediate_name, intermediate)):
        if size % SIZE_STEP:
            raise ValueError(
                f"{name}={size} is not a multiple of {SIZE_STEP}, as {NAME} weights need; pad the "
                f"experts with zeros to {align_up(size, SIZE_STEP)}"
            )


def intermediate_of(num_bytes: int, hidden: int) -> int:
    """`I` of planes of so many bytes an expert beside `D`; 0 where there is none."""
    # Scales are a small share of the values: the size is the largest whose values fit, or little
    # less.
    most = num_bytes // hidden // SIZE_STEP * SIZE_STEP
    for intermediate in range(most, 0, -SIZE_STEP):
        found = plane_bytes(intermediate, hidden)
        if found <= num_bytes:
            return intermediate if found == num_bytes else 0
    return 0


def quantize_fp8(weights):
    """Expert weights as FP8 planes, for a Domain with `weight_dtype="float8_e4m3fn"`.

    Meant for load time: once, and under `jax.jit` with the shardings that the weights have. Planes
    of one expert stay on its device.

    Args:
      weights: `ExpertWeights` of bf16 or f32: gate, up `[..., H, I, D]`, down `[..., H, D, I]`.
        Biases stay as they are.

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
        **{name: quantize_plane(getattr(weights, name), name) for name in ("gate", "up", "down")}
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
    if plane.dtype != jnp.uint8:
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
    """Rows of activations `[..., columns]`.

    Returns:
      Values `[..., columns] e4m3`, and `[..., ceil(columns / 128)] f32` scales.
    """
    *lead, columns = rows.shape
    padded = _pad_to(rows.astype(jnp.float32), align_up(columns, BLOCK))
    blocks = padded.reshape(*lead, padded.shape[-1] // BLOCK, BLOCK)
    up, down = _scales(_amax(blocks, (-1,)))
    codes = _to_e4m3(blocks * up[..., None]).reshape(padded.shape)[..., :columns]
    return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn), down


class Float8Block128:
    """`weight_format="float8_block128"`: planes of `quantize_fp8`, tokens of `quantize_rows`."""

    name, index, has_gradient = "float8_block128", 2, False
    token_format = "float8_row128"
    weight_dtype: str | None = NAME

    def check_sizes(
        self, hidden: int, intermediate: int, hidden_name: str, intermediate_name: str
    ) -> None:
        check_sizes(hidden, intermediate, hidden_name, intermediate_name)

    def check_dtype(self, dtype: str) -> None:
        """Tokens of any dtype are quantised as they are dispatched."""

    def plane(self, name: str, rows: int, columns: int) -> PlaneLayout:
        num_bytes = plane_bytes(rows, columns)
        scales = value_bytes(rows, columns)
        return PlaneLayout(
            name, (rows, columns), 8, BLOCK, num_bytes, scales, (num_bytes,), "uint8"
        )

    def intermediate_of(self, gate, hidden: int) -> int:
        return intermediate_of(gate.shape[-1], hidden) if gate.ndim >= 1 else 0

    def values(self, plane, rows, columns):
        return dequantize_fp8(plane, rows, columns)

    def pack(self, values):
        return quantize_plane(values)

    def expert_mlp(self, rows, planes, biases, activation, is_route):
        """Rows are quantised for each 128 columns. For each 128 of K, in order, the f32 sum of the
        e4m3 products is scaled by both scales and added in f32. `h` stays f32 until it is
        quantised; down's sums are rounded to the rows' dtype. No gradient passes through here.
        """
        hidden = rows.shape[-1]
        intermediate = self.intermediate_of(planes[0], hidden)
        quantised = quantize_rows(rows)
        gated, linear = (_product(*quantised, p, intermediate, hidden) for p in planes[:2])
        if biases:
            gated, linear = gated + biases[0][:, None], linear + biases[1][:, None]
        outputs = _product(
            *quantize_rows(activation(gated, linear)), planes[2], hidden, intermediate
        )
        if biases:
            outputs = outputs + biases[2][:, None]
        return outputs.astype(rows.dtype)


FORMAT = Float8Block128()


def _product(values, scales, plane, num_out, depth):
    """`[n, rows, depth]` with its scales times planes `[num_out, depth]`: `[n, rows, num_out]`."""
    weights, weight_scales = split_plane(plane, num_out, depth)
    # Zeros fill the last block.
    values, weights = (
        _pad_to(a.astype(jnp.float32), align_up(depth, BLOCK)) for a in (values, weights)
    )

    def product(block):
        cut = lambda a: lax.dynamic_slice_in_dim(a, block * BLOCK, BLOCK, 2)  # noqa: E731
        # Exact products whatever the precision: e4m3 has four significant bits.
        total = jnp.einsum(
            "nrk,nik->nri", cut(values), cut(weights), preferred_element_type=jnp.float32
        )
        at = lambda a: lax.dynamic_index_in_dim(a, block, 2, keepdims=False)  # noqa: E731
        columns = jnp.repeat(at(weight_scales), BLOCK, 1)[:, :num_out]
        return total * (at(scales)[:, :, None] * columns[:, None])

    add = lambda block, total: total + product(block)  # noqa: E731
    return lax.fori_loop(1, scales.shape[-1], add, product(0))


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
