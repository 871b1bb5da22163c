"""`fused_moe` in plain JAX: the gradient, and the fallback on any platform.

`sum_k topk_weights[t,k] * down(act(gate(x), up(x)))` with the rounding of the fused kernels: gate
and up accumulate in f32, `h` is rounded to x.dtype, down accumulates in f32 and is rounded to
x.dtype, the weighted sum over k is f32 in k order with one final cast. Biases are added in f32, to
complete sums. Dropless. Weight formats bring products of their own.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_iser.experts.activation import Activation
from jax_iser.experts.operands import Expert, check_fused_moe_arguments
from jax_iser.experts.weights import ExpertWeights

SCHEMES = ("blocked", "dense")
_MAX_BLOCK = 128
_BLOCKS_PER_STEP = 32
_NO_ROW = 2**31 - 1


def _take(operand, index):
    """`operand[index]` whose gradient is summed in f32, whatever the operand's type."""
    operand = jnp.asarray(operand)
    if not jnp.issubdtype(operand.dtype, jnp.floating):
        return operand[index]
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
      (-1 in filler rows), `block_expert [blocks] i32`, and the number of blocks in use.
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
        jnp.full(num_blocks * rows, -1, jnp.int32)
        .at[sorted_rows]
        .set(order.astype(jnp.int32), mode="drop")
    )
    blocks = jnp.arange(num_blocks)
    block_expert = jnp.minimum(jnp.searchsorted(block_stop, blocks, side="right"), num_experts - 1)
    return position, route_of_row, block_expert, block_stop[-1]


def _route_outputs(expert, x, local_ids, planes, biases):
    """The rounded expert output of each route, `[tokens, K, D]`; zeros where no expert is local."""
    (tokens, hidden), num_experts = x.shape, planes[0].shape[0]
    top_k = local_ids.shape[1]
    rows = _block_rows(tokens * top_k, num_experts)
    position, route_of_row, block_expert, used = _layout(local_ids.reshape(-1), num_experts, rows)

    def compute(step_rows, step_experts):
        is_route = (step_rows >= 0)[:, None]
        tokens_of_rows = _take(x, jnp.maximum(step_rows, 0) // top_k)
        # Filler rows are zero: whatever a token holds, only its own routes may see it.
        operands = jnp.where(is_route, tokens_of_rows, 0).reshape(-1, rows, hidden)
        of_blocks = [[_take(a, step_experts) for a in arrays] for arrays in (planes, biases)]
        is_route = is_route.reshape(-1, rows, 1)
        outputs = expert.format.expert_mlp(operands, *of_blocks, expert.activation, is_route)
        return outputs.reshape(-1, hidden)

    num_steps = -(-block_expert.shape[0] // _BLOCKS_PER_STEP)
    if num_steps <= 2:
        outputs = compute(route_of_row, block_expert)
    else:
        # With experts on many ranks most blocks are empty on each: step over those.
        extra = num_steps * _BLOCKS_PER_STEP - block_expert.shape[0]
        step_experts = jnp.pad(block_expert, (0, extra)).reshape(num_steps, -1)
        step_rows = jnp.pad(route_of_row, (0, extra * rows), constant_values=-1)
        step_rows = step_rows.reshape(num_steps, -1)
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


def _dense(activation, x, topk_ids, topk_weights, is_valid, planes, biases):
    """Every expert on every token as three wide matmuls, weights folded in before down."""
    gate, up, down = planes
    num_experts, intermediate, hidden = gate.shape
    weights = jnp.where(is_valid, topk_weights.astype(jnp.float32), 0.0)
    one_hot = topk_ids[..., None] == jnp.arange(num_experts)
    of_expert = jnp.sum(weights[..., None] * one_hot, axis=1)
    is_route = jnp.any(one_hot, axis=1)[..., None]
    x = jnp.where(is_valid.any(axis=1, keepdims=True), x, 0)
    wide = num_experts * intermediate
    gated, linear = (
        (x @ plane.reshape(wide, hidden).T).reshape(-1, num_experts, intermediate)
        for plane in (gate, up)
    )
    if biases:
        gated, linear = gated + biases[0], linear + biases[1]
    gated, linear = (jnp.where(is_route, product, 0) for product in (gated, linear))
    h = activation(gated.astype(jnp.float32), linear.astype(jnp.float32)) * of_expert[..., None]
    y = h.astype(x.dtype).reshape(-1, wide) @ down.transpose(0, 2, 1).reshape(wide, hidden)
    return (y + of_expert @ biases[2]).astype(x.dtype) if biases else y


def fused_moe(
    x: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    gate_bias: jax.Array | None = None,
    up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
    *,
    axis_name: str | None = None,
    scheme: str = "blocked",
    weight_format: str | None = None,
    activation: str | Activation = "silu",
) -> jax.Array:
    """The routed experts of a MoE layer in plain JAX: differentiable, on any platform.

    Args:
      x: `[tokens, D]` f32 or bf16.
      topk_ids: `[tokens, K] i32` over the experts of all ranks; ids outside are padding and
        contribute 0, whatever their weight.
      topk_weights: `[tokens, K] f32`.
      gate, up: `[H, I, D]`, x.dtype: this rank's experts, all of them without `axis_name`.
      down: `[H, D, I]`. Or all three as `weight_format` has them.
      gate_bias, up_bias, down_bias: `[H, I] f32`, `[H, I] f32`, `[H, D] f32`, or None: all or none.
      axis_name: inside `shard_map`, the axis the experts are spread over in order. Tokens of all
        ranks are gathered, each rank computes the routes of its experts, and the rounded outputs
        of the routes return by a sum in which every route has one non-zero term: the result does
        not depend on the number of ranks by more than the matmuls do.
      scheme: `"blocked"` sorts routes by expert into blocks and follows the contract's rounding.
        `"dense"` runs every expert on every token: the same function with rounding of its own
        (the weights enter before down) and `E/K` times the arithmetic, but faster to train small
        models with on GPUs; without `axis_name` only. The gradient of every expert sums over all
        tokens there, so a token that is not finite and is routed anywhere reaches all of them;
        `"blocked"` keeps it to the experts that the token names.
      weight_format: of the planes; None for elements of x.dtype. With `"float8_block128"` they are
        `[H, bytes] u8` of `quantize_fp8`; gradients are then those of the layer with the
        dequantised weights in x.dtype, and weights have none.
      activation: an `Activation` or the name of one.

    Returns:
      `[tokens, D]` x.dtype.

    Raises:
      ValueError, TypeError: shapes, dtypes or a scheme that do not fit.
    """
    expert = Expert.of(weight_format, activation, x.dtype)
    weights = ExpertWeights(gate, up, down, gate_bias, up_bias, down_bias)
    check_fused_moe_arguments(x, topk_ids, topk_weights, weights, expert)
    if scheme not in SCHEMES:
        raise ValueError(f"scheme={scheme!r} is not one of {SCHEMES}")
    if scheme == "dense" and axis_name is not None:
        raise ValueError('scheme="dense" is for axis_name=None; use "blocked" inside shard_map')
    if scheme == "dense" and not expert.format.has_gradient:
        raise ValueError(
            f'scheme="dense" takes no weights of {expert.weight_format}; use "blocked"'
        )
    if topk_ids.size == 0:
        return jnp.zeros_like(x)
    planes, biases = (gate, up, down), weights.biases
    if scheme == "dense":
        is_valid = (topk_ids >= 0) & (topk_ids < gate.shape[0])
        operands = (x, topk_ids, topk_weights, is_valid, planes, biases)
        return _dense(expert.activation, *operands)
    blocked = _blocked if expert.format.has_gradient else _blocked_of_values
    return blocked(expert, axis_name, x, topk_weights, biases, topk_ids, planes)


def _blocked(expert, axis_name, x, topk_weights, biases, topk_ids, planes):
    """The routed experts by blocks of routes."""
    num_local = planes[0].shape[0]
    if axis_name is None:
        is_valid = (topk_ids >= 0) & (topk_ids < num_local)
        outputs = _route_outputs(expert, x, topk_ids, planes, biases)
        return _combine(outputs, topk_weights, is_valid, x.dtype)
    is_valid = (topk_ids >= 0) & (topk_ids < num_local * lax.axis_size(axis_name))
    all_x = lax.all_gather(x, axis_name, tiled=True)
    all_ids = lax.all_gather(topk_ids, axis_name, tiled=True)
    local_ids = all_ids - lax.axis_index(axis_name) * num_local
    outputs = _route_outputs(expert, all_x, local_ids, planes, biases)
    outputs = lax.psum_scatter(outputs, axis_name, tiled=True)
    return _combine(outputs, topk_weights, is_valid, x.dtype)


# Rounding to a format of few bits has no gradient of its own: it counts as the identity.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _blocked_of_values(expert, axis_name, x, topk_weights, biases, topk_ids, planes):
    return _blocked(expert, axis_name, x, topk_weights, biases, topk_ids, planes)


def _forward_of_values(expert, axis_name, *operands):
    return _blocked_of_values(expert, axis_name, *operands), operands


def _backward_of_values(expert, axis_name, operands, cotangent):
    x, topk_weights, biases, topk_ids, planes = operands
    hidden = x.shape[1]
    wide = (expert.format.intermediate_of(planes[0], hidden), hidden)
    shapes = (wide, wide, wide[::-1])
    values = tuple(
        expert.format.values(plane, *shape).astype(x.dtype)
        for plane, shape in zip(planes, shapes, strict=True)
    )
    plain_expert = dataclasses.replace(expert, weight_format=str(x.dtype))

    def plain(x, topk_weights, biases):
        return _blocked(plain_expert, axis_name, x, topk_weights, biases, topk_ids, values)

    _, pull = jax.vjp(plain, x, topk_weights, biases)
    no_gradient = lambda a: np.zeros(a.shape, jax.dtypes.float0)  # noqa: E731
    return *pull(cotangent), *jax.tree.map(no_gradient, (topk_ids, planes))


_blocked_of_values.defvjp(_forward_of_values, _backward_of_values)
