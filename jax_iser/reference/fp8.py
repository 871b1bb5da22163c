"""Twin of the expert's products in FP8, in plain JAX and in NumPy.

Rows are quantised for each 128 columns. For each 128 of K, in order, the f32 sum of the e4m3
products is scaled by both scales and added in f32. `h = silu(g) * u` stays f32 until it is
quantised; down's sums are rounded to the rows' dtype.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from jax_iser import fp8


def expert_mlp(rows, gate, up, down):
    """`[n, rows, D]` through one expert each, planes `[n, bytes]`."""
    hidden = rows.shape[-1]
    intermediate = fp8.intermediate_of(gate.shape[-1], hidden)
    quantised = fp8.quantize_rows(rows)
    gated, linear = (_product(*quantised, plane, intermediate, hidden) for plane in (gate, up))
    h = fp8.quantize_rows(jax.nn.silu(gated) * linear)
    return _product(*h, down, hidden, intermediate).astype(rows.dtype)


def _product(values, scales, plane, num_out, depth):
    """`[n, rows, depth]` with its scales times planes `[num_out, depth]`: `[n, rows, num_out]`."""
    weights, weight_scales = fp8.split_plane(plane, num_out, depth)

    def product(block):
        cut = lambda a: lax.dynamic_slice_in_dim(a, block * fp8.BLOCK, fp8.BLOCK, 2)  # noqa: E731
        of_rows, of_plane = (cut(a).astype(jnp.float32) for a in (values, weights))
        # Exact products whatever the precision: e4m3 has four significant bits.
        total = jnp.einsum("nrk,nik->nri", of_rows, of_plane, preferred_element_type=jnp.float32)
        at = lambda a: lax.dynamic_index_in_dim(a, block, 2, keepdims=False)  # noqa: E731
        columns = jnp.repeat(at(weight_scales), fp8.BLOCK, 1)
        return total * (at(scales)[:, :, None] * columns[:, None])

    add = lambda block, total: total + product(block)  # noqa: E731
    return lax.fori_loop(1, depth // fp8.BLOCK, add, product(0))


def quantize_plane_numpy(plane) -> np.ndarray:
    """`[..., rows, columns]` to `[..., bytes] u8`, as `jax_iser.fp8.quantize_plane`."""
    plane = np.asarray(plane).astype(np.float32)
    *lead, rows, columns = plane.shape
    pad = [(0, 0)] * len(lead) + [(0, -rows % fp8.BLOCK), (0, -columns % fp8.BLOCK)]
    blocks = np.pad(plane, pad)
    padded = blocks.shape
    grid = (padded[-2] // fp8.BLOCK, padded[-1] // fp8.BLOCK)
    blocks = blocks.reshape(*lead, grid[0], fp8.BLOCK, grid[1], fp8.BLOCK)
    codes, scales = _quantize(blocks, (-3, -1))
    codes = codes.reshape(padded)[..., :rows, :columns].reshape(*lead, -1)
    bytes_of = np.zeros((*lead, fp8.plane_bytes(rows, columns)), np.uint8)
    bytes_of[..., : rows * columns] = codes.view(np.uint8)
    scales = np.ascontiguousarray(scales.reshape(*lead, -1)).view(np.uint8)
    first = fp8.value_bytes(rows, columns)
    bytes_of[..., first : first + scales.shape[-1]] = scales
    return bytes_of


def split_plane_numpy(plane, rows, columns) -> tuple[np.ndarray, np.ndarray]:
    """Values `[..., rows, columns]` and scales `[..., row blocks, column blocks]`, both f32."""
    plane, lead = np.asarray(plane), plane.shape[:-1]
    grid = (-(-rows // fp8.BLOCK), -(-columns // fp8.BLOCK))
    values = np.ascontiguousarray(plane[..., : rows * columns]).view(ml_dtypes.float8_e4m3fn)
    first = fp8.value_bytes(rows, columns)
    scales = np.ascontiguousarray(plane[..., first : first + 4 * grid[0] * grid[1]])
    values = values.reshape(*lead, rows, columns).astype(np.float32)
    return values, scales.view(np.float32).reshape(*lead, *grid)


def quantize_rows_numpy(rows) -> tuple[np.ndarray, np.ndarray]:
    """Values `[..., columns]` and scales `[..., columns / 128]`, both f32."""
    grid = (rows.shape[-1] // fp8.BLOCK, fp8.BLOCK)
    blocks = np.asarray(rows).astype(np.float32).reshape(*rows.shape[:-1], *grid)
    codes, scales = _quantize(blocks, (-1,))
    return codes.astype(np.float32).reshape(rows.shape), scales.reshape(scales.shape[:-1])


def _quantize(blocks, axes):
    """e4m3 of f32 blocks and their scales, axes kept."""
    f32 = np.float32
    amax = np.max(np.where(np.isnan(blocks), f32(0), np.abs(blocks)), axes, keepdims=True)
    most = np.where(amax > f32(fp8.MIN_AMAX), amax, f32(fp8.MIN_AMAX))
    with np.errstate(invalid="ignore"):
        values = np.clip(blocks * (f32(fp8.MAX) / most), f32(-fp8.MAX), f32(fp8.MAX))
    return values.astype(ml_dtypes.float8_e4m3fn), most / f32(fp8.MAX)


def expert_mlp_numpy(rows, gate, up, down) -> np.ndarray:
    """`[rows, D]` through one expert with planes `[bytes]`, rounded to the rows' dtype."""
    hidden = rows.shape[1]
    intermediate = fp8.intermediate_of(gate.shape[-1], hidden)
    quantised = quantize_rows_numpy(rows)
    gated, linear = (_product_numpy(*quantised, p, intermediate, hidden) for p in (gate, up))
    with np.errstate(over="ignore"):
        h = gated / (1 + np.exp(-gated)) * linear
    return _product_numpy(*quantize_rows_numpy(h), down, hidden, intermediate).astype(rows.dtype)


def _product_numpy(values, scales, plane, num_out, depth):
    weights, weight_scales = split_plane_numpy(plane, num_out, depth)
    total = np.zeros((len(values), num_out), np.float32)
    for block in range(depth // fp8.BLOCK):
        cut = slice(block * fp8.BLOCK, (block + 1) * fp8.BLOCK)
        columns = np.repeat(weight_scales[:, block], fp8.BLOCK)
        total += values[:, cut] @ weights[:, cut].T * (scales[:, block, None] * columns)
    return total
