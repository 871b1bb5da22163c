"""Traces of every format, small, written into a temporary folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

DATA = Path(__file__).parent / "data"


def collect(cut) -> np.ndarray:
    """`[I, L, P, E]`: all iterations of a cut."""
    return np.array(list(cut.counts))


def make_counts(seed: int, iterations=2, layers=2, ranks=4, experts=16, tokens=32, top_k=2):
    """Iterations `[L, P, E] i32` of skewed counts; every rank brings `tokens * top_k` routes."""
    rng = np.random.default_rng(seed)
    share = rng.dirichlet(np.full(experts, 0.4), size=layers)
    return [
        np.stack(
            [rng.multinomial(tokens * top_k, share[layer], size=ranks) for layer in range(layers)]
        ).astype(np.int32)
        for _ in range(iterations)
    ]


def write_tensorrt_llm(folder: Path, counts: np.ndarray, top_k: int = 2) -> Path:
    """`counts [steps, R, L, E]` as TensorRT-LLM writes them; layers 3, 4, ... as in a model with
    dense layers first."""
    folder.mkdir(parents=True, exist_ok=True)
    meta = {"num_experts": counts.shape[3], "num_experts_per_token": top_k}
    (folder / "meta_info.json").write_text(json.dumps(meta))
    for rank in range(counts.shape[1]):
        tensors = {
            f"{100 + step}_{3 + layer}": counts[step, rank, layer].astype(np.int32)
            for step in range(counts.shape[0])
            for layer in range(counts.shape[2])
        }
        save_file(tensors, folder / f"rank{rank}.safetensors")
    return folder


def write_megatron(folder: Path, ids: np.ndarray) -> Path:
    """`ids [steps, R, L, tokens, k]` as Megatron writes them."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ids.shape[1]):
        lines = [
            json.dumps(
                {
                    "step": step,
                    "stage": "pre_dispatch",
                    "block": "decoder",
                    "layer": layer,
                    "rank": rank,
                    "num_tokens": ids.shape[3],
                    "topk": ids.shape[4],
                    "top_indices": ids[step, rank, layer].tolist(),
                }
            )
            for step in range(ids.shape[0])
            for layer in range(ids.shape[2])
        ]
        (folder / f"router_trace_rank{rank}.jsonl").write_text("\n".join(lines) + "\n")
    return folder
