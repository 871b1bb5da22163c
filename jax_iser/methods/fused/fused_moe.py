"""`fused_moe`: dispatch, expert tiles and combine over rewritten routes (paper section 4.4)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_iser.experts.weights import ExpertWeights
from jax_iser.methods.fused import ffi
from jax_iser.methods.fused.checks import check_tokens, check_weights
from jax_iser.methods.fused.start import Ticket, not_mapped
from jax_iser.plan.types import Plan

NUM_PLAN_FIELDS = len(Plan._fields)


def plan_results(config, routes_shape) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Types of `Plan`'s fields, in their order."""
    rows, ranks = config.num_ranks * config.num_helper_slots, config.num_ranks
    shapes = (routes_shape, (rows, 6), (rows, ranks), (), (ranks,), (ranks,), ())
    results = tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes)
    return (*results, jax.ShapeDtypeStruct((), jnp.uint32))


def _workspace(config, num_rows) -> tuple[jax.ShapeDtypeStruct, ...]:
    """On GPUs, where XLA gives the call its scratch as one more result."""
    if config.platform != "cuda":
        return ()
    from jax_iser.domain.cuda.runtime import workspace_bytes

    num_bytes = workspace_bytes(config, num_rows // config.ranks_per_device)
    return (jax.ShapeDtypeStruct((num_bytes,), jnp.uint8),)


def _make_call(config):
    @not_mapped
    def fused_moe(words, x, topk_weights, after, *planes):
        results = (
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            *plan_results(config, topk_weights.shape),
            *_workspace(config, x.shape[0]),
        )
        operands = (words, x, topk_weights, after, *planes)
        y, *plan = ffi.call("fused_moe", config, results, *operands)[: 1 + NUM_PLAN_FIELDS]
        y, plan[0] = ffi.varying_like(x, (y, plan[0]))
        return y, *plan

    return fused_moe


def fused_moe(
    x: jax.Array,
    topk_weights: jax.Array,
    weights: ExpertWeights,
    ticket: Ticket,
    *,
    after: jax.Array | None = None,
) -> tuple[jax.Array, Plan]:
    """Completes the call that `start` began.

    `sum_k topk_weights[t, k] * down(act(gate(x[t]), up(x[t])))`, over the experts that `start`
    was given. Products are summed in f32, each expert's output is rounded to `x.dtype`, the
    weighted sum runs in k order in f32. With FP8 weights tokens and `act(g, u)` are quantised for
    each 128 columns. The bits do not depend on where a route ran. For gradients use `moe_layer`.

    Args:
      x: `[tokens, D]`.
      topk_weights: `[tokens, K] f32`.
      weights: the arrays that `start` got.
      ticket: from `start`.
      after: an array that must be computed before this call begins (the shared expert's output).

    Returns:
      `y [tokens, D]` of x's dtype, and the `Plan`.

    Raises:
      ValueError, TypeError: operands that do not fit the Domain.
    """
    config, weights = ticket.config, ExpertWeights(*weights)
    check_tokens("x", x, config.hidden_size, config, config.dtype)
    check_tokens("topk_weights", topk_weights, config.top_k, config, "float32")
    check_weights(weights, config)
    after = jnp.zeros((), jnp.int32) if after is None else after
    y, *plan = _make_call(config)(ticket.words, x, topk_weights, after, *weights.planes)
    return y, Plan(*plan)
