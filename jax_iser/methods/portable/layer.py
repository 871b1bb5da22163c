"""`method="portable"`: plain JAX, differentiable, on any platform, no Domain.

It computes at home what the fused kernels compute at home or in helper slots: with the bitwise
contract a plan changes no output, so here the plan is made only to be shown.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_iser.domain.config import DTYPES
from jax_iser.experts.activation import Activation
from jax_iser.experts.formats import format_of
from jax_iser.experts.weights import ExpertWeights
from jax_iser.methods.base import check_balance, check_experts_of
from jax_iser.methods.portable import plan as portable
from jax_iser.methods.portable.fused_moe import fused_moe
from jax_iser.plan.types import Plan


def _alike(array, axis_name):
    """An array that all ranks have alike, and that `shard_map`'s check then knows to be."""
    if axis_name is None or axis_name not in jax.typeof(array).manual_axis_type.varying:
        return array
    return lax.pmax(array, axis_name)


def _counts(topk_ids, num_experts, ranks_here, axis_name):
    """Routes by source rank and expert, `[P, E] i32`, ranks of all devices."""
    ids = topk_ids.reshape(ranks_here, -1)
    here = jax.vmap(lambda row: portable.histogram(row, num_experts))(ids)
    if axis_name is None:
        return here
    return _alike(lax.all_gather(here, axis_name, tiled=True), axis_name)


def _plan(topk_ids, num_experts, ranks_here, axis_name, balance, knobs):
    """The `Plan` of these routes; without balancing every route runs at home."""
    topk_ids = lax.stop_gradient(topk_ids)
    counts = _counts(topk_ids, num_experts, ranks_here, axis_name)
    num_ranks, num_slots = len(counts), knobs["num_helper_slots"]
    if balance == "haloq" and num_ranks > 1 and num_slots > 0:
        portable.check_num_routes(topk_ids.size // ranks_here * num_ranks)
        plan = portable.plan_counts(counts, **knobs)
        first_rank = 0 if axis_name is None else lax.axis_index(axis_name) * ranks_here
        ranks = first_rank + jnp.arange(ranks_here, dtype=jnp.int32)
        rewrite = jax.vmap(lambda ids, rank: portable.rewrite(ids, counts, plan, rank, num_slots))
        route_slot = rewrite(topk_ids.reshape(ranks_here, -1), ranks).reshape(topk_ids.shape)
    else:
        plan = portable.plan_nothing(counts, num_slots)
        route_slot = portable.home_slots(topk_ids, num_experts, num_ranks, num_slots)
    return Plan(
        route_slot=route_slot,
        broadcasts=plan.broadcasts,
        quota=plan.quota,
        num_broadcasts=plan.num_broadcasts,
        load_before=plan.load_before,
        load=plan.load,
        status=jnp.int32(0),
        generation=jnp.uint32(0),
    )


def moe_layer(
    x: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array,
    weights,
    domain=None,
    *,
    layer=0,
    shared_expert=None,
    balance: str = "haloq",
    axis_name: str | None = None,
    num_helper_slots: int = 4,
    min_group_size: int = 4,
    scheme: str = "blocked",
    weight_format: str | None = None,
    activation: str | Activation | None = None,
):
    """One MoE layer: routed experts plus the shared one, and the plan that HALO-Q makes of it.

    Args:
      x: `[tokens, D]` rows of this device's ranks, rank by rank.
      topk_ids: `[tokens, K] i32`; ids outside the experts of all ranks contribute 0.
      topk_weights: `[tokens, K] f32`.
      weights: `ExpertWeights` of this device's ranks, `[V*H, I, D]` (down `[V*H, D, I]`), or
        FP8 `[V*H, bytes]`, or either stacked `[L, ...]` with `layer`; biases likewise.
      domain: a `DomainHandle`, read for its sizes and knobs only, or None: then one rank a device.
      layer: int or i32 scalar; selects from stacked weights.
      shared_expert: callable `[tokens, D] -> [tokens, D]` whose result is added.
      balance: `"haloq"` plans on the device; `"none"` plans nothing, and is the choice for
        training, since no output depends on the plan.
      axis_name: the mapped axis the experts are spread over; None outside `shard_map`.
      num_helper_slots, min_group_size: the plan's knobs where `domain` is None.
      weight_format, activation: of the experts; None is the Domain's, and without one x's dtype and
        `"silu"`.
      scheme: see `jax_iser.methods.portable.fused_moe.fused_moe`.

    Returns:
      `(y [tokens, D] x.dtype, Plan)`; the plan's `generation` and `status` are 0.

    Raises:
      ValueError, TypeError: operands that do not fit, naming both values.
    """
    check_balance(balance)
    knobs = {"num_helper_slots": num_helper_slots, "min_group_size": min_group_size}
    ranks_here = 1
    if domain is not None:
        config = domain.config
        # Weights of elements have x's dtype, whatever that of the Domain's tokens is.
        named = None if config.weight_format in DTYPES else config.weight_format
        expected = format_of(named, x.dtype).name
        check_experts_of(config, None if weight_format == expected else weight_format, activation)
        weight_format, activation = expected, config.activation
        ranks_here = config.ranks_per_device
        knobs = {
            "num_helper_slots": config.num_helper_slots,
            "min_group_size": config.min_group_size,
            "min_routes": config.min_routes,
            "gain_threshold": config.gain_threshold,
            "copy_rule": config.copy_rule,
        }
    of_weights = format_of(weight_format, x.dtype)
    unstacked = of_weights.plane("gate", 1, x.shape[-1]).num_dims
    weights = ExpertWeights(*weights)
    if weights.gate.ndim > unstacked and weights.gate.shape[0] == 0:
        raise ValueError(
            f"gate has shape {weights.gate.shape}: the weights are stacked over 0 layers; stack "
            "those of one layer or more"
        )
    weights = weights.of_layer(layer, unstacked)
    gate = weights.gate
    devices = 1 if axis_name is None else lax.axis_size(axis_name)
    num_experts = gate.shape[0] * devices
    if domain is not None and num_experts != domain.config.num_experts:
        raise ValueError(
            f"the weights are of {num_experts} experts on {devices} devices, the Domain was made "
            f"for num_experts={domain.config.num_experts}; pass the weights of all its experts"
        )
    if gate.shape[0] % ranks_here or x.shape[0] % ranks_here:
        raise ValueError(
            f"{gate.shape[0]} experts and {x.shape[0]} tokens on a device must both be divisible "
            f"by ranks_per_device={ranks_here}; pad the tokens to "
            f"{x.shape[0] + -x.shape[0] % ranks_here} and drop the outputs of the rows added"
        )
    y = fused_moe(
        x,
        topk_ids,
        topk_weights,
        *weights,
        axis_name=axis_name,
        scheme=scheme,
        weight_format=of_weights.name,
        activation=activation or "silu",
    )
    if shared_expert is not None:
        y = y + shared_expert(x)
    return y, _plan(topk_ids, num_experts, ranks_here, axis_name, balance, knobs)


class Portable:
    """Plain JAX; `scheme` as of `fused_moe`."""

    needs_domain = False

    def __init__(self, scheme: str = "blocked"):
        self.scheme, self.spans_ranks = scheme, scheme != "dense"

    def __call__(self, *operands, weights_version, **options):
        return moe_layer(*operands, **options, scheme=self.scheme)
