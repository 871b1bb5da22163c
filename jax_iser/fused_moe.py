"""`fused_moe`: dispatch, expert tiles and combine over rewritten routes (paper section 4.4)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_iser import _ffi
from jax_iser.planner import Plan
from jax_iser.reference.fused_moe import fused_moe as reference_fused_moe
from jax_iser.replication import ExpertWeights, Ticket, check_tokens, check_weights, not_mapped


def plan_results(config, num_routes_shape) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of `Plan`'s fields, in their order."""
    rows, ranks = config.num_ranks * config.num_helper_slots, config.num_ranks
    shapes = (num_routes_shape, (rows, 6), (rows, ranks), (), (ranks,), (ranks,), ())
    results = tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes)
    return (*results, jax.ShapeDtypeStruct((), jnp.uint32))


def _make_call(config):
    @not_mapped
    def fused_moe(words, x, topk_weights, gate, up, down, after):
        results = (
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            *plan_results(config, topk_weights.shape),
        )
        return _ffi.call("fused_moe", results, words, x, topk_weights, gate, up, down, after)

    return fused_moe


def fused_moe(
    x: jax.Array,
    topk_weights: jax.Array,
    weights: ExpertWeights,
    ticket: Ticket,
    *,
    after: jax.Array | None = None,
    topk_ids: jax.Array | None = None,
    axis_name: str | None = None,
    layer=0,
) -> tuple[jax.Array, Plan]:
    """Completes the call that `start` began.

    `sum_k topk_weights[t, k] * down(silu(gate(x[t])) * up(x[t]))`, over the experts that `start`
    was given. Products are summed in f32, each expert's output is rounded to `x.dtype`, the
    weighted sum runs in k order in f32. The bits do not depend on where a route ran.

    Args:
      x: `[tokens, D]`.
      topk_weights: `[tokens, K] f32`.
      weights: the arrays that `start` got.
      ticket: from `start`.
      after: an array that must be computed before this call begins (the shared expert's output).
      topk_ids, axis_name, layer: as given to `start`; needed for gradients only, which recompute
        through `jax_iser.reference`. Without `topk_ids` the call has no gradient.

    Returns:
      `y [tokens, D]` of x's dtype, and the `Plan`.

    Raises:
      ValueError, TypeError: operands that do not fit the Domain.
    """
    config = ticket.config
    check_tokens("x", x, config.hidden_size, config, config.dtype)
    check_tokens("topk_weights", topk_weights, config.top_k, config, "float32")
    check_weights(weights, config)
    call = _make_call(config)
    after = jnp.zeros((), jnp.int32) if after is None else after

    @jax.custom_vjp
    def differentiable(x, topk_weights, weights, words, after, topk_ids, layer):
        y, *plan = call(words, x, topk_weights, *weights, after)
        return y, Plan(*plan)

    def forward(*args):
        return differentiable(*args), args

    def backward(args, cotangents):
        x, topk_weights, weights, words, after, topk_ids, layer = args
        if topk_ids is None:
            raise ValueError("gradients of fused_moe need topk_ids=; pass what start was given")

        def reference(x, topk_weights, weights):
            planes = [plane[layer] if plane.ndim == 4 else plane for plane in weights]
            return reference_fused_moe(x, topk_ids, topk_weights, *planes, axis_name=axis_name)

        _, pull = jax.vjp(reference, x, topk_weights, weights)
        no_gradient = [zero_cotangent(value) for value in (words, after, topk_ids, layer)]
        return (*pull(cotangents[0]), *no_gradient)

    differentiable.defvjp(forward, backward)
    return differentiable(
        x, topk_weights, weights, ticket.words, after, topk_ids, jnp.asarray(layer, jnp.int32)
    )


def zero_cotangent(value):
    """The zero cotangent of an operand that has no gradient."""
    if jnp.issubdtype(value.dtype, jnp.inexact):
        return jnp.zeros_like(value)
    return np.zeros(value.shape, jax.dtypes.float0)
