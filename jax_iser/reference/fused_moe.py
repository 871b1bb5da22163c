"""Twin of `fused_moe` in plain JAX and in NumPy: the oracle, the gradient, and the fallback.

`sum_k topk_weights[t,k] * down(silu(gate(x)) * up(x))` with the rounding of the fused kernels:
gate and up accumulate in f32, `h` is rounded to x.dtype, down accumulates in f32 and is rounded
to x.dtype, the weighted sum over k is f32 in k order with one final cast. Dropless.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SCHEMES = ("blocked", "dense")
_MAX_BLOCK = 128
_BLOCKS_PER_STEP = 32
_NO_ROW = 2**31 - 1


def check_fused_moe_arguments(x, topk_ids, topk_weights, gate, up, down) -> None:
    """Raises ValueError or TypeError, naming both values, for operands that do not fit."""
    if x.ndim != 2:
        raise ValueError(f"x has shape {x.shape}, expected [tokens, hidden]; reshape it first")
    if topk_ids.ndim != 2 or topk_ids.shape[0] != x.shape[0]:
        raise ValueError(f"topk_ids has shape {topk_ids.shape}, expected ({x.shape[0]}, top_k)")
    if topk_weights.shape != topk_ids.shape:
        raise ValueError(
            f"topk_weights has shape {topk_weights.shape}, topk_ids {topk_ids.shape}: "
            "one weight a route"
        )
    if not jnp.issubdtype(topk_ids.dtype, jnp.integer):
        raise TypeError(f"topk_ids has dtype {topk_ids.dtype}, expected int32")
    hidden = x.shape[1]
    if gate.ndim != 3 or gate.shape[2] != hidden:
        raise ValueError(
            f"gate has shape {gate.shape}, expected [experts, intermediate, {hidden}] for x "
            f"{x.shape}"
        )
    num_experts, intermediate, _ = gate.shape
    for name, plane, expected in (
        ("up", up, gate.shape),
        ("down", down, (num_experts, hidden, intermediate)),
    ):
        if plane.shape != expected:
            raise ValueError(
                f"{name} has shape {plane.shape}, expected {expected} beside gate {gate.shape}"
            )
    for name, plane in (("gate", gate), ("up", up), ("down", down)):
        if plane.dtype != x.dtype:
            raise TypeError(f"{name} has dtype {plane.dtype}, x {x.dtype}; cast one of them")


def _expert_mlp(rows, gate, up, down):
    """`[n, rows, D]` through one expert each, `[n, I, D]`, `[n, I, D]`, `[n, D, I]`."""
    f32 = jnp.float32
    gated = jnp.einsum("nrd,nid->nri", rows, gate, preferred_element_type=f32)
    linear = jnp.einsum("nrd,nid->nri", rows, up, preferred_element_type=f32)
    hidden = (jax.nn.silu(gated) * linear).astype(rows.dtype)
    return jnp.einsum("nri,ndi->nrd", hidden, down, preferred_element_type=f32).astype(rows.dtype)


def _take(operand, index):
    """`operand[index]` whose gradient is summed in f32, whatever the operand's type."""
    return operand.astype(jnp.float32)[index].astype(operand.dtype)


def _block_rows(num_routes: int, num_experts: int) -> int:
    """Rows a block: about an expert's mean share, a power of two from 8 to 128."""
    rows = 8
    while rows < _MAX_BLOCK and rows * 2 * num_experts <= num_routes:
        rows *= 2
    return rows


def _layout(local_ids, num_experts, rows):
    """Where each route sits once routes are sorted by expert into blocks of one expert each.

    Args:
      local_ids: `[routes] i32`; anything outside `[0, num_experts)` gets no row.

    Returns:
      `position [routes] i32` (row of each route; `_NO_ROW` without one), `route_of_row [rows] i32`
      (0 in padding), `block_expert [blocks] i32`, and the number of blocks in use.
    """
    num_routes = local_ids.shape[0]
    num_blocks = min(-(-num_routes // rows) + num_experts, num_routes)
    is_local = (local_ids >= 0) & (local_ids < num_experts)
    ids = jnp.where(is_local, local_ids, num_experts)
    sizes = jnp.bincount(ids, length=num_experts + 1)[:num_experts]
    block_stop = jnp.cumsum(-(-sizes // rows))
    first_row = (block_stop - -(-sizes // rows)) * rows
    order = jnp.argsort(ids, stable=True)
    first_route = jnp.cumsum(sizes) - sizes
    sorted_ids = ids[order]
    expert = jnp.minimum(sorted_ids, num_experts - 1)
    sorted_rows = first_row[expert] + jnp.arange(num_routes) - first_route[expert]
    sorted_rows = jnp.where(sorted_ids < num_experts, sorted_rows, _NO_ROW)
    position = jnp.zeros(num_routes, jnp.int32).at[order].set(sorted_rows.astype(jnp.int32))
    route_of_row = (
        jnp.zeros(num_blocks * rows, jnp.int32)
        .at[sorted_rows]
        .set(order.astype(jnp.int32), mode="drop")
    )
    blocks = jnp.arange(num_blocks)
    block_expert = jnp.minimum(jnp.searchsorted(block_stop, blocks, side="right"), num_experts - 1)
    return position, route_of_row, block_expert, block_stop[-1]


def _route_outputs(x, local_ids, gate, up, down):
    """The rounded expert output of each route, `[tokens, K, D]`; zeros where no expert is local."""
    (tokens, hidden), num_experts = x.shape, gate.shape[0]
    top_k = local_ids.shape[1]
    rows = _block_rows(tokens * top_k, num_experts)
    position, route_of_row, block_expert, used = _layout(local_ids.reshape(-1), num_experts, rows)

    def compute(step_rows, step_experts):
        return _expert_mlp(
            _take(x, step_rows // top_k).reshape(-1, rows, hidden),
            *(_take(plane, step_experts) for plane in (gate, up, down)),
        ).reshape(-1, hidden)

    num_steps = -(-block_expert.shape[0] // _BLOCKS_PER_STEP)
    if num_steps <= 2:
        outputs = compute(route_of_row, block_expert)
    else:
        # With experts on many ranks most blocks are empty on each: step over those.
        extra = num_steps * _BLOCKS_PER_STEP - block_expert.shape[0]
        step_experts = jnp.pad(block_expert, (0, extra)).reshape(num_steps, -1)
        step_rows = jnp.pad(route_of_row, (0, extra * rows)).reshape(num_steps, -1)
        empty = jnp.zeros((step_rows.shape[1], hidden), x.dtype)

        def step(args):
            index, rows_here, experts_here = args
            return lax.cond(
                index * _BLOCKS_PER_STEP < used,
                compute,
                lambda *_: empty,
                rows_here,
                experts_here,
            )

        outputs = lax.map(step, (jnp.arange(num_steps), step_rows, step_experts))
        outputs = outputs.reshape(-1, hidden)
    outputs = jnp.concatenate([outputs, jnp.zeros((1, hidden), x.dtype)])
    position = jnp.minimum(position, outputs.shape[0] - 1)
    return _take(outputs, position).reshape(tokens, top_k, hidden)


def _combine(outputs, topk_weights, is_valid, dtype):
    """The f32 weighted sum over k, in k order, of `[tokens, K, D]`, cast once."""
    tokens, top_k, hidden = outputs.shape
    total = jnp.zeros((tokens, hidden), jnp.float32)
    weights = jnp.where(is_valid, topk_weights.astype(jnp.float32), 0.0)
    for k in range(top_k):
        total = total + weights[:, k, None] * outputs[:, k].astype(jnp.float32)
    return total.astype(dtype)


def _dense(x, topk_ids, topk_weights, is_valid, gate, up, down):
    """Every expert on every token as three wide matmuls, weights folded in before down."""
    num_experts, intermediate, hidden = gate.shape
    weights = jnp.where(is_valid, topk_weights.astype(jnp.float32), 0.0)
    one_hot = topk_ids[..., None] == jnp.arange(num_experts)
    of_expert = jnp.sum(weights[..., None] * one_hot, axis=1)
    wide = num_experts * intermediate
    gated = x @ gate.reshape(wide, hidden).T
    linear = x @ up.reshape(wide, hidden).T
    h = jax.nn.silu(gated.astype(jnp.float32)) * linear
    h = h.reshape(-1, num_experts, intermediate) * of_expert[..., None]
    return h.astype(x.dtype).reshape(-1, wide) @ down.transpose(0, 2, 1).reshape(wide, hidden)


def fused_moe(
    x: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    axis_name: str | None = None,
    scheme: str = "blocked",
) -> jax.Array:
    """The routed experts of a MoE layer in plain JAX: differentiable, on any platform.

    Args:
      x: `[tokens, D]` f32 or bf16.
      topk_ids: `[tokens, K] i32` over the experts of all ranks; ids outside are padding and
        contribute 0, whatever their weight.
      topk_weights: `[tokens, K] f32`.
      gate, up: `[H, I, D]`, x.dtype: this rank's experts, all of them without `axis_name`.
      down: `[H, D, I]`.
      axis_name: inside `shard_map`, the axis the experts are spread over in order. Tokens of all
        ranks are gathered, each rank computes the routes of its experts, and the rounded outputs
        of the routes return by a sum in which every route has one non-zero term: the result does
        not depend on the number of ranks by more than the matmuls do.
      scheme: `"blocked"` sorts routes by expert into blocks and follows the contract's rounding.
        `"dense"` runs every expert on every token: the same function with rounding of its own
        (the weights enter before down) and `E/K` times the arithmetic, but faster to train small
        models with on GPUs; without `axis_name` only.

    Returns:
      `[tokens, D]` x.dtype.

    Raises:
      ValueError, TypeError: shapes, dtypes or a scheme that do not fit.
    """
    check_fused_moe_arguments(x, topk_ids, topk_weights, gate, up, down)
    if scheme not in SCHEMES:
        raise ValueError(f"scheme={scheme!r} is not one of {SCHEMES}")
    num_local = gate.shape[0]
    if topk_ids.size == 0:
        return jnp.zeros_like(x)
    if axis_name is None:
        is_valid = (topk_ids >= 0) & (topk_ids < num_local)
        if scheme == "dense":
            return _dense(x, topk_ids, topk_weights, is_valid, gate, up, down)
        outputs = _route_outputs(x, topk_ids, gate, up, down)
        return _combine(outputs, topk_weights, is_valid, x.dtype)
    if scheme == "dense":
        raise ValueError('scheme="dense" is for axis_name=None; use "blocked" inside shard_map')
    is_valid = (topk_ids >= 0) & (topk_ids < num_local * lax.axis_size(axis_name))
    all_x = lax.all_gather(x, axis_name, tiled=True)
    all_ids = lax.all_gather(topk_ids, axis_name, tiled=True)
    local_ids = all_ids - lax.axis_index(axis_name) * num_local
    outputs = _route_outputs(all_x, local_ids, gate, up, down)
    outputs = lax.psum_scatter(outputs, axis_name, tiled=True)
    return _combine(outputs, topk_weights, is_valid, x.dtype)


def fused_moe_numpy(x, topk_ids, topk_weights, gate, up, down) -> np.ndarray:
    """The same in NumPy, one expert at a time over all experts: arguments as `fused_moe`."""
    x, topk_ids, topk_weights, gate, up, down = (
        np.asarray(a) for a in (x, topk_ids, topk_weights, gate, up, down)
    )
    check_fused_moe_arguments(x, topk_ids, topk_weights, gate, up, down)
    f32 = np.float32
    outputs = np.zeros((*topk_ids.shape, x.shape[1]), f32)
    for expert in range(gate.shape[0]):
        token, k = np.nonzero(topk_ids == expert)
        rows = x[token].astype(f32)
        gated = rows @ gate[expert].astype(f32).T
        with np.errstate(over="ignore"):
            h = gated / (1 + np.exp(-gated)) * (rows @ up[expert].astype(f32).T)
        h = h.astype(x.dtype).astype(f32)
        outputs[token, k] = (h @ down[expert].astype(f32).T).astype(x.dtype).astype(f32)
    is_valid = (topk_ids >= 0) & (topk_ids < gate.shape[0])
    weights = np.where(is_valid, topk_weights, 0).astype(f32)
    total = np.zeros(x.shape, f32)
    for choice in range(topk_ids.shape[1]):
        total = total + weights[:, choice, None] * outputs[:, choice]
    return total.astype(x.dtype)
