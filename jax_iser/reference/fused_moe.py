"""NumPy twin of `fused_moe`: the oracle.

`sum_k topk_weights[t,k] * down(act(gate(x), up(x)))` with the rounding of the fused kernels: gate
and up accumulate in f32, `h` is rounded to x.dtype, down accumulates in f32 and is rounded to
x.dtype, the weighted sum over k is f32 in k order with one final cast. Biases are added in f32, to
complete sums. Weight formats bring products of their own.
"""

from __future__ import annotations

import numpy as np

from jax_iser._moved import old_names
from jax_iser.experts.activation import Activation
from jax_iser.experts.bundle import NUM_WEIGHT_PLANES
from jax_iser.experts.operands import Expert, check_fused_moe_arguments
from jax_iser.experts.weights import ExpertWeights
from jax_iser.reference.formats import EXPERT_MLP


def fused_moe_numpy(
    x,
    topk_ids,
    topk_weights,
    gate,
    up,
    down,
    gate_bias=None,
    up_bias=None,
    down_bias=None,
    *,
    weight_format: str | None = None,
    activation: str | Activation = "silu",
) -> np.ndarray:
    """The routed experts of a layer, one at a time: arguments as the portable `fused_moe`."""
    x, topk_ids, topk_weights = (np.asarray(a) for a in (x, topk_ids, topk_weights))
    weights = ExpertWeights(gate, up, down, gate_bias, up_bias, down_bias)
    weights = ExpertWeights(*(np.asarray(plane) for plane in weights.planes))
    of_expert = Expert.of(weight_format, activation, x.dtype)
    check_fused_moe_arguments(x, topk_ids, topk_weights, weights, of_expert)
    f32, num_experts = np.float32, weights.gate.shape[0]
    outputs = np.zeros((*topk_ids.shape, x.shape[1]), f32)
    expert_mlp = EXPERT_MLP[of_expert.weight_format]
    for expert in range(num_experts):
        token, k = np.nonzero(topk_ids == expert)
        planes = (plane[expert] for plane in weights.planes[:NUM_WEIGHT_PLANES])
        biases = [bias[expert] for bias in weights.biases]
        rows = expert_mlp(x[token], *planes, biases, of_expert.activation)
        outputs[token, k] = rows.astype(f32)
    is_valid = (topk_ids >= 0) & (topk_ids < num_experts)
    route_weights = np.where(is_valid, topk_weights, 0).astype(f32)
    total = np.zeros(x.shape, f32)
    for choice in range(topk_ids.shape[1]):
        total = total + route_weights[:, choice, None] * outputs[:, choice]
    return total.astype(x.dtype)


_PORTABLE = "jax_iser.methods.portable.fused_moe"
__getattr__ = old_names(__name__, {"fused_moe": _PORTABLE, "SCHEMES": _PORTABLE})
