"""`start`: plans a layer call and begins to copy its hot experts (paper section 4.3)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jax_iser.domain.config import DomainConfig
from jax_iser.domain.handle import DomainHandle
from jax_iser.experts.weights import ExpertWeights
from jax_iser.methods.fused import ffi
from jax_iser.methods.fused.checks import as_i32, check_layer, check_start_arguments

VMAP_REMEDY = (
    "vmap over a jax_iser call is not supported: all ranks take part in each call; fold the mapped "
    'axis into the tokens, or use method="portable" with balance="none"'
)


class Ticket(NamedTuple):
    """What `start` gives to `fused_moe`: use it once.

    Attributes:
      words: `[4] u32`; names the Domain, the device and the invocation.
      config: the Domain's `DomainConfig`.
    """

    words: jax.Array
    config: DomainConfig


def not_mapped(call):
    """`call`, with an error that names the remedy under `vmap`."""
    wrapped = custom_vmap(call)

    @wrapped.def_vmap
    def raise_remedy(axis_size, in_batched, *args):
        raise NotImplementedError(VMAP_REMEDY)

    return wrapped


def call_params(layer, weights_version, balance, config) -> jax.Array:
    """Operand `[3] i32` of a call: layer, weights_version, whether to balance."""
    version = as_i32("weights_version", weights_version)
    is_balanced = jnp.int32(balance == "haloq")
    return jnp.stack([check_layer(layer, config.num_layers), version, is_balanced])


def _make_call(config):
    @not_mapped
    def start(words, params, topk_ids, x, *planes):
        results = (
            jax.ShapeDtypeStruct((4,), jnp.uint32),
            jax.ShapeDtypeStruct(x.shape, x.dtype),
        )
        operands = (words, params, topk_ids, x, *planes)
        return ffi.varying_like(x, ffi.call("start", config, results, *operands, aliases={3: 1}))

    return start


def start(
    x: jax.Array,
    topk_ids: jax.Array,
    weights: ExpertWeights,
    domain: DomainHandle,
    *,
    layer=0,
    weights_version=0,
    balance: str = "haloq",
) -> tuple[Ticket, jax.Array]:
    """Begins a layer call on this device: route counts are exchanged, hot experts copied.

    Returns at once; planning and copying go on beside what the program does next. Every device of
    the Domain must make the call, and complete it by `fused_moe`. For gradients use `moe_layer`.

    Args:
      x: `[tokens, D]`, passed through: what uses the returned one runs after this call, and beside
        the copies.
      topk_ids: `[tokens, K] i32`; ids outside `[0, E)` are padding.
      weights: this device's `ExpertWeights`; `fused_moe` must get the same arrays.
      domain: the device's part of a `DomainHandle`.
      layer: int or i32 scalar below `num_layers`; selects stacked weights and the helper bank.
      weights_version: i32; with `resident=True`, change it whenever the weights change.
      balance: `"haloq"`, or `"none"` to copy nothing.

    Returns:
      The ticket for `fused_moe`, and x.

    Raises:
      ValueError, TypeError: operands that do not fit the Domain.
    """
    weights = ExpertWeights(*weights)
    check_start_arguments(x, topk_ids, weights, domain, balance)
    params = call_params(layer, weights_version, balance, domain.config)
    words, x = _make_call(domain.config)(domain.words, params, topk_ids, x, *weights.planes)
    return Ticket(words, domain.config), x
