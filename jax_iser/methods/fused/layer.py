"""`method="fused"`: the calls of a Domain, with a gradient."""

from __future__ import annotations

import jax
import numpy as np

from jax_iser.experts.weights import ExpertWeights
from jax_iser.methods.base import check_experts_of
from jax_iser.methods.fused.checks import as_i32, check_layer, check_start_arguments
from jax_iser.methods.fused.fused_moe import fused_moe
from jax_iser.methods.fused.start import start
from jax_iser.methods.portable.fused_moe import fused_moe as portable_fused_moe


class Fused:
    """Plans, copies and computes in a Domain; gradients recompute through the portable method."""

    needs_domain = True
    spans_ranks = True

    def __call__(
        self,
        x,
        topk_ids,
        topk_weights,
        weights,
        domain,
        *,
        layer,
        weights_version,
        shared_expert,
        balance,
        axis_name,
        weight_format,
        activation,
    ):
        if domain is None:
            raise ValueError('method="fused" needs a Domain; pass domain.handle or use "portable"')
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
    """The call with a gradient that recomputes it through the portable method.

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

        def portable(x, topk_weights, weights, captured):
            config = domain.config
            weights = weights.of_layer(layer, config.bundle.planes[0].num_dims)
            y = portable_fused_moe(
                x,
                topk_ids,
                topk_weights,
                *weights,
                axis_name=axis_name,
                weight_format=config.weight_format,
                activation=config.activation,
            )
            return y if shared_expert is None else y + shared_expert(x, *captured)

        _, pull = jax.vjp(portable, *operands)
        rest = (topk_ids, domain, layer, weights_version)
        no_gradient = jax.tree.map(lambda a: np.zeros(a.shape, jax.dtypes.float0), rest)
        return pull(cotangents[0]), *no_gradient

    call.defvjp(forward, backward)
    return call
