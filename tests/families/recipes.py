"""How `nnx.MoE` is made for each family, from the fields of its Hugging Face config."""

from __future__ import annotations

import json
import pathlib

import numpy as np

from jax_iser import Activation

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
PREFIX = "model.layers.0."
_GROUPED = (
    *("n_routed_experts", "num_experts_per_tok", "n_shared_experts", "moe_intermediate_size"),
    *("n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor"),
)


def _take(config, *names):
    return {name: config[name] for name in names}


def _gpt_oss(config):
    activation = Activation(
        "clamped_swiglu", limit=config["swiglu_limit"], alpha=config["swiglu_alpha"]
    )
    options = {"activation": activation, "expert_biases": True, "router_bias": True}
    sizes = _take(config, "num_local_experts", "num_experts_per_tok", "intermediate_size")
    return options | sizes | {"score_function": "softmax_topk"}


def _mixtral(config):
    return _take(config, "num_local_experts", "num_experts_per_tok", "intermediate_size")


def _qwen3_moe(config):
    names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
    return _take(config, *names)


def _qwen2_moe(config):
    gated = {"n_shared_experts": 1, "shared_expert_gate": True}
    return _qwen3_moe(config) | gated | _take(config, "shared_expert_intermediate_size")


def _olmoe(config):
    names = ("num_experts", "num_experts_per_tok", "intermediate_size", "norm_topk_prob")
    return _take(config, *names)


def _grouped(config):
    return _take(config, *_GROUPED) | {"scoring_func": "sigmoid", "routed_bias": True}


FAMILIES = {
    "gpt_oss": _gpt_oss,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "olmoe": _olmoe,
    "deepseek_v3": _grouped,
    "glm4_moe": _grouped,
}


def options_of(family: str, config: dict) -> dict:
    """Keyword arguments of `MoE`; the hidden size is `config["hidden_size"]`."""
    return FAMILIES[family](config)


def load_fixture(family: str) -> dict:
    """`tensors` by name, `config`, `x`, and per dtype the block's `y` and `topk_ids`."""
    with np.load(FIXTURES / f"{family}.npz") as file:
        arrays = {name: file[name] for name in file.files}
    stem = "tensor:"
    tensors = {n.removeprefix(stem): v for n, v in arrays.items() if n.startswith(stem)}
    rest = {name: value for name, value in arrays.items() if not name.startswith(stem)}
    return rest | {"tensors": tensors, "config": json.loads(str(arrays["config"]))}
