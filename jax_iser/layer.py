"""`moe_layer`: one MoE layer on one device, for use inside `shard_map`."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from jax_iser.experts.activation import Activation
from jax_iser.experts.weights import ExpertWeights
from jax_iser.fused_moe import fused_moe
from jax_iser.plan.types import Plan
from jax_iser.reference.fused_moe import fused_moe as reference_fused_moe
from jax_iser.reference.layer import check_experts_of
from jax_iser.replication import (
    as_i32,
    check_layer,
    check_start_arguments,
    start,
)

METHODS = ("fused", "reference")

__all__ = ["METHODS", "ExpertWeights", "moe_layer"]


def moe_layer(
    x: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array,
    weights: ExpertWeights,
    domain=None,
    *,
    layer=0,
    weights_version=0,
    shared_expert: Callable[[jax.Array], jax.Array] | None = None,
    method: str = "fused",
    balance: str = "haloq",
    axis_name: str | None = None,
    weight_format: str | None = None,
    activation: str | Activation | None = None,
) -> tuple[jax.Array, Plan]:
    """Routed experts plus the shared one, balanced over the ranks of the Domain.

    The order is data: `start` passes `x` on to the shared expert, whose output `fused_moe` takes,
    so the copies of hot experts run beside the shared expert on every platform.

    Args:
      x: `[tokens, D]`, the rows of this device's ranks, rank by rank.
      topk_ids: `[tokens, K] i32`; ids outside `[0, E)` are padding and contribute 0. An expert that
        a token names twice is computed twice, and both weights count.
      topk_weights: `[tokens, K] f32`.
      weights: this device's experts, `[V*H, I, D]` (down `[V*H, D, I]`), or those of
        `quantize_fp8`, `[V*H, bytes]`; or either stacked `[L, V*H, ...]` with `layer`.
      domain: the device's part of a `DomainHandle`; may be None for `method="reference"`.
      layer: int or i32 scalar, may be traced.
      weights_version: i32 scalar, for `resident=True`.
      shared_expert: callable `[tokens, D] -> [tokens, D]`; its output is added.
      method: `"fused"`, or `"reference"`: plain JAX on any platform.
      balance: `"haloq"`, or `"none"`.
      weight_format, activation: of the experts, where `domain` is None: see `DomainConfig`. None
        is the Domain's, and without one x's dtype and `"silu"`.
      axis_name: the mapped axis of the ranks; needed for `"reference"` and for gradients with
        more than one device.

    Returns:
      `(y [tokens, D] of x's dtype, Plan)`. With `"fused"`, `y` has the same bits whatever the
      plan. Gradients of `"fused"` recompute through the reference; FP8 weights have none, and
      those of the rest are taken on the dequantised weights.

    Raises:
      ValueError, TypeError: operands that do not fit, naming both values.

    Example:
      >>> mesh = jax.make_mesh((1,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> x, topk_ids = jnp.ones((8, 16)), jnp.zeros((8, 2), jnp.int32).at[:, 1].set(1)
      >>> topk_weights, experts = jnp.full((8, 2), 0.5), jnp.ones((4, 32, 16))
      >>> weights = jax_iser.ExpertWeights(experts, experts, experts.mT)  # gate, up, down
      >>> sizes = dict(num_experts=4, top_k=2, hidden_size=16, intermediate_size=32)
      >>> spec = jax.P("ep")
      >>> layer = jax.shard_map(jax_iser.moe_layer, mesh=mesh, in_specs=spec,
      ...                       out_specs=(spec, jax_iser.Plan.specs("ep")))
      >>> with jax_iser.Domain(mesh, "ep", max_tokens_per_rank=8, **sizes) as domain:
      ...     y, plan = jax.jit(layer)(x, topk_ids, topk_weights, weights, domain.handle)
      ...     y.shape, plan.load.tolist()
      ((8, 16), [16])
    """
    if method not in METHODS:
        raise ValueError(f"method={method!r} is not one of {', '.join(METHODS)}")
    if method == "reference":
        from jax_iser.reference.layer import moe_layer as reference

        return reference(
            x,
            topk_ids,
            topk_weights,
            weights,
            domain,
            layer=layer,
            shared_expert=shared_expert,
            balance=balance,
            axis_name=axis_name,
            weight_format=weight_format,
            activation=activation,
        )
    if domain is None:
        raise ValueError('method="fused" needs a Domain; pass domain.handle or use "reference"')
    weights, captured = ExpertWeights(*weights), []
    check_start_arguments(x, topk_ids, weights, domain, balance)
    check_experts_of(domain.config, weight_format, activation)
    if shared_expert is not None:
        # What it closes over becomes an operand, so that it gets a gradient.
        shared_expert, captured = jax.closure_convert(shared_expert, x)
    call = _differentiable(shared_expert, balance, axis_name)
    layer = check_layer(layer, domain.config.num_layers)
    version = as_i32("weights_version", weights_version)
    return call((x, topk_weights, weights, captured), topk_ids, domain, layer, version)


def _differentiable(shared_expert, balance, axis_name):
    """The call with a gradient that recomputes it through the reference.

    `start` and `fused_moe` are inside one rule, which keeps nothing but operands for the backward
    pass: a program that needs only the gradient then drops both or neither.
    """

    @jax.custom_vjp
    def call(operands, topk_ids, domain, layer, weights_version):
        x, topk_weights, weights, captured = operands
        options = {"layer": layer, "weights_version": weights_version, "balance": balance}
        ticket, x = start(x, topk_ids, weights, domain, **options)
        shared = None if shared_expert is None else shared_expert(x, *captured)
        y, plan = fused_moe(x, topk_weights, weights, ticket, after=shared)
        return y if shared is None else y + shared, plan

    def forward(*args):
        return call(*args), args

    def backward(args, cotangents):
        operands, topk_ids, domain, layer, weights_version = args
        if axis_name is None and domain.config.num_devices > 1:
            raise ValueError(
                f"gradients over {domain.config.num_devices} devices need the name of their axis; "
                "pass axis_name= to moe_layer"
            )

        def reference(x, topk_weights, weights, captured):
            config = domain.config
            weights = weights.of_layer(layer, config.bundle.planes[0].num_dims)
            y = reference_fused_moe(
                x,
                topk_ids,
                topk_weights,
                *weights,
                axis_name=axis_name,
                weight_format=config.weight_format,
                activation=config.activation,
            )
            return y if shared_expert is None else y + shared_expert(x, *captured)

        _, pull = jax.vjp(reference, *operands)
        rest = (topk_ids, domain, layer, weights_version)
        no_gradient = jax.tree.map(lambda a: np.zeros(a.shape, jax.dtypes.float0), rest)
        return pull(cotangents[0]), *no_gradient

    call.defvjp(forward, backward)
    return call
