"""`moe_layer`: one MoE layer on one device, for use inside `shard_map`."""

from __future__ import annotations

from collections.abc import Callable

import jax

from jax_iser.experts.activation import Activation
from jax_iser.experts.weights import ExpertWeights as ExpertWeights
from jax_iser.methods import METHODS as METHODS
from jax_iser.methods import find_method
from jax_iser.plan.types import Plan


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
      domain: the device's part of a `DomainHandle`; may be None for other methods than `"fused"`.
      layer: int or i32 scalar, may be traced.
      weights_version: i32 scalar, for `resident=True`.
      shared_expert: callable `[tokens, D] -> [tokens, D]`; its output is added.
      method: a name of `jax_iser.methods.METHODS`: `"fused"`; `"portable"`, plain JAX on any
        platform; or `"dense"`, which runs every expert on every token, on one device.
      balance: `"haloq"`, or `"none"`.
      weight_format, activation: of the experts, where `domain` is None: see `DomainConfig`. None
        is the Domain's, and without one x's dtype and `"silu"`.
      axis_name: the mapped axis of the ranks; needed for `"portable"` and for gradients with
        more than one device.

    Returns:
      `(y [tokens, D] of x's dtype, Plan)`. With `"fused"`, `y` has the same bits whatever the
      plan. Gradients of `"fused"` recompute through `"portable"`; FP8 weights have none, and
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
    return find_method(method)(
        x,
        topk_ids,
        topk_weights,
        weights,
        domain,
        layer=layer,
        weights_version=weights_version,
        shared_expert=shared_expert,
        balance=balance,
        axis_name=axis_name,
        weight_format=weight_format,
        activation=activation,
    )
