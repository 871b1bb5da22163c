"""NumPy twins of an expert's products, by weight format.

`float8_block128`: rows are quantised for each 128 columns. For each 128 of K, in order, the f32 sum
of the e4m3 products is scaled by both scales and added in f32. `h` stays f32 until it is quantised;
down's sums are rounded to the rows' dtype.
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

from jax_iser.experts.formats import float8_block128 as fp8


def elements_mlp(rows, gate, up, down, biases, activation) -> np.ndarray:
    """`[rows, D]` through one expert with planes of the rows' dtype; sums in f32."""
    f32 = np.float32
    wide = rows.astype(f32)
    gated, linear = (wide @ plane.astype(f32).T for plane in (gate, up))
    if biases:
        gated, linear = gated + biases[0], linear + biases[1]
    h = activation(gated, linear, np).astype(rows.dtype).astype(f32)
    outputs = h @ down.astype(f32).T
    return (outputs + biases[2] if biases else outputs).astype(rows.dtype)


def quantize_plane_numpy(plane) -> np.ndarray:
    """`[..., rows, columns]` to `[..., bytes] u8`, as `quantize_fp8`."""
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
    """Values `[..., columns]` and scales `[..., ceil(columns / 128)]`, both f32."""
    *lead, columns = rows.shape
    pad = [(0, 0)] * len(lead) + [(0, -columns % fp8.BLOCK)]
    padded = np.pad(np.asarray(rows).astype(np.float32), pad)
    codes, scales = _quantize(
        padded.reshape(*lead, padded.shape[-1] // fp8.BLOCK, fp8.BLOCK), (-1,)
    )
    values = codes.astype(np.float32).reshape(padded.shape)[..., :columns]
    return values, scales.reshape(scales.shape[:-1])


def _quantize(blocks, axes):
    """e4m3 of f32 blocks and their scales, axes kept."""
    f32 = np.float32
    amax = np.max(np.where(np.isnan(blocks), f32(0), np.abs(blocks)), axes, keepdims=True)
    most = np.where(amax > f32(fp8.MIN_AMAX), amax, f32(fp8.MIN_AMAX))
    with np.errstate(invalid="ignore"):
        values = np.clip(blocks * (f32(fp8.MAX) / most), f32(-fp8.MAX), f32(fp8.MAX))
    return values.astype(ml_dtypes.float8_e4m3fn), most / f32(fp8.MAX)


def float8_mlp(rows, gate, up, down, biases, activation) -> np.ndarray:
    """`[rows, D]` through one expert with planes `[bytes]`, rounded to the rows' dtype."""
    hidden = rows.shape[1]
    intermediate = fp8.intermediate_of(gate.shape[-1], hidden)
    quantised = quantize_rows_numpy(rows)
    gated, linear = (_product_numpy(*quantised, p, intermediate, hidden) for p in (gate, up))
    if biases:
        gated, linear = gated + biases[0], linear + biases[1]
    h = quantize_rows_numpy(activation(gated, linear, np))
    outputs = _product_numpy(*h, down, hidden, intermediate)
    return (outputs + biases[2] if biases else outputs).astype(rows.dtype)


def _product_numpy(values, scales, plane, num_out, depth):
    weights, weight_scales = split_plane_numpy(plane, num_out, depth)
    total = np.zeros((len(values), num_out), np.float32)
    for block in range(scales.shape[1]):
        cut = slice(block * fp8.BLOCK, (block + 1) * fp8.BLOCK)
        columns = np.repeat(weight_scales[:, block], fp8.BLOCK)[:num_out]
        total += values[:, cut] @ weights[:, cut].T * (scales[:, block, None] * columns)
    return total


# By the name of the weight format: (rows, gate, up, down, biases, activation) of one expert.
EXPERT_MLP: dict[str, Callable[..., np.ndarray]] = {
    "float32": elements_mlp,
    "bfloat16": elements_mlp,
    "float8_block128": float8_mlp,
}
