"""`plan` alone: a call's plan without the call."""

from __future__ import annotations

import jax

from jax_iser.methods.base import check_balance
from jax_iser.methods.fused import ffi
from jax_iser.methods.fused.checks import check_handle, check_tokens
from jax_iser.methods.fused.fused_moe import plan_results
from jax_iser.methods.fused.start import call_params
from jax_iser.plan.types import Plan


def plan(topk_ids: jax.Array, domain, *, layer=0, weights_version=0, balance="haloq") -> Plan:
    """Plans a call without making it: counts are exchanged, nothing is copied. For tools and tests.

    Args:
      topk_ids: `[tokens, K] i32` of this device; call it inside `shard_map` on every device.
      domain: the device's part of a `DomainHandle`.
      layer, weights_version, balance: as in `moe_layer`.

    Returns:
      The `Plan` that `start` would follow.

    Raises:
      ValueError, TypeError: operands that do not fit the Domain.
    """
    check_handle(domain)
    check_balance(balance)
    check_tokens("topk_ids", topk_ids, domain.config.top_k, domain.config, "int32")
    params = call_params(layer, weights_version, balance, domain.config)
    results = plan_results(domain.config, topk_ids.shape)
    operands = (domain.words, params, topk_ids)
    route_slot, *common = ffi.call("plan", domain.config, results, *operands)
    return Plan(*ffi.varying_like(topk_ids, (route_slot,)), *common)
