"""Writes the fixtures of test_parity.py: transformers' own MoE blocks on random weights.

Needs torch and transformers: `PYTHONPATH=tests python tests/families/make_fixtures.py`.
Each fixture is a block's tensors under the names that checkpoints of the family have, an input,
and what the block makes of it in f32 and in bf16. All values are bf16 numbers, so that both
computations start from the same ones.
"""

from __future__ import annotations

import importlib
import json

import numpy as np
import torch
from families.recipes import FAMILIES, FIXTURES, PREFIX

TOKENS = 24
SIZES = {"hidden_size": 32, "intermediate_size": 16, "num_experts_per_tok": 3}
_OF_GROUPS = {
    "n_routed_experts": 8,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
# Config class, block class, and config fields beside SIZES.
BLOCKS = {
    "gpt_oss": ("GptOss", "GptOssMLP", {"num_local_experts": 8}),
    "mixtral": ("Mixtral", "MixtralSparseMoeBlock", {"num_local_experts": 8}),
    "qwen2_moe": (
        "Qwen2Moe",
        "Qwen2MoeSparseMoeBlock",
        {
            "num_experts": 8,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
            "norm_topk_prob": False,
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        "Qwen3MoeSparseMoeBlock",
        {"num_experts": 8, "moe_intermediate_size": 16, "norm_topk_prob": True},
    ),
    "olmoe": ("Olmoe", "OlmoeSparseMoeBlock", {"num_experts": 8, "norm_topk_prob": False}),
    "deepseek_v3": (
        "DeepseekV3",
        "DeepseekV3MoE",
        _OF_GROUPS | {"n_group": 4, "topk_group": 2},
    ),
    "glm4_moe": ("Glm4Moe", "Glm4MoeMoE", _OF_GROUPS | {"n_group": 1, "topk_group": 1}),
}
# Standard deviations: gpt-oss's gates pass its limit, and selection biases change some choices.
_SCALES = {"gate.weight": 0.5, "router.weight": 0.5, "e_score_correction_bias": 0.2, "bias": 0.5}
_OTHERS, _CLAMPED = 0.3, {"experts.gate_up_proj": 1.0}


def make_block(family: str, sizes: dict, seed: int):
    """The family's block with random bf16 numbers in f32, and its config."""
    name, block_name, fields = BLOCKS[family]
    module = importlib.import_module(f"transformers.models.{family}")
    config = getattr(module, f"{name}Config")(**SIZES | fields | sizes)
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config._experts_implementation = "eager"
    block = getattr(modeling, block_name)(config).eval()
    random = torch.Generator().manual_seed(seed)
    for key, value in sorted(block.state_dict().items()):
        scales = _SCALES | (_CLAMPED if family == "gpt_oss" else {})
        scale = next((s for end, s in scales.items() if key.endswith(end)), _OTHERS)
        value.copy_((torch.randn(value.shape, generator=random) * scale).bfloat16())
    return block, config


def run(block, x):
    """The block's output, and its router's choice `[tokens, K]`, sorted."""
    chosen = []
    router = getattr(block, "router", None) or block.gate
    hook = router.register_forward_hook(lambda module, args, result: chosen.append(result[-1]))
    with torch.no_grad():
        result = block(x[None])
    hook.remove()
    y = (result[0] if isinstance(result, tuple) else result)[0]
    return y.float().numpy(), np.sort(chosen[0].numpy(), axis=-1).astype(np.int32)


def checkpoint_tensors(family: str, block) -> dict[str, np.ndarray]:
    """The block's tensors as the family's checkpoints name them."""
    tensors = {key: value.float().numpy() for key, value in block.state_dict().items()}
    stem, names = "mlp.", ("gate_proj", "up_proj", "down_proj")
    if family == "mixtral":
        stem, names = "block_sparse_moe.", ("w1", "w3", "w2")
    if family != "gpt_oss":
        gate_up, down = tensors.pop("experts.gate_up_proj"), tensors.pop("experts.down_proj")
        inner = gate_up.shape[1] // 2
        for e in range(len(gate_up)):
            planes = (gate_up[e, :inner], gate_up[e, inner:], down[e])
            for name, plane in zip(names, planes, strict=True):
                tensors[f"experts.{e}.{name}.weight"] = plane
    return {PREFIX + stem + key: value for key, value in tensors.items()}


def make(family: str, sizes: dict | None = None, tokens: int = TOKENS, seed: int = 0) -> dict:
    """The arrays of one fixture."""
    block, config = make_block(family, sizes or {}, seed)
    tensors = checkpoint_tensors(family, block)
    random = torch.Generator().manual_seed(seed + 1)
    x = torch.randn((tokens, config.hidden_size), generator=random).bfloat16().float()
    arrays = {f"tensor:{name}": np.array(value) for name, value in tensors.items()}
    fields = (*SIZES, *BLOCKS[family][2], "swiglu_limit", "swiglu_alpha")
    values = {name: getattr(config, name) for name in fields if hasattr(config, name)}
    arrays |= {"x": x.numpy(), "config": np.array(json.dumps(values))}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        y, topk_ids = run(block.to(dtype), x.to(dtype))
        arrays |= {f"y_{name}": y, f"topk_ids_{name}": topk_ids}
    return arrays


def main():
    FIXTURES.mkdir(exist_ok=True)
    for family in FAMILIES:
        path = FIXTURES / f"{family}.npz"
        np.savez_compressed(path, **make(family))
        print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
