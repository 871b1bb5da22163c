"""Sizes of the language model, as written beside its checkpoint."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only byte-level MoE language model; every layer is attention and a MoE block.

    Sizes are in elements; `intermediate_size` is that of one routed expert. `max_seq_len` is the
    length trained on: longer sequences run, less well.
    """

    vocab_size: int = 256
    hidden_size: int = 128
    num_layers: int = 7
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 48
    num_experts: int = 32
    top_k: int = 4
    num_shared_experts: int = 1
    shared_intermediate_size: int = 128
    score_function: str = "sigmoid"
    routed_bias: bool = True
    routed_scaling_factor: float = 2.0
    norm_topk_prob: bool = True
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    max_seq_len: int = 1024

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not divisible by num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embedding needs pairs")

    @classmethod
    def load(cls, path: str | Path) -> ModelConfig:
        """Reads a `config.json`; unknown or missing keys are a ValueError that names them."""
        values = json.loads(Path(path).read_text())
        known = {field.name for field in dataclasses.fields(cls)}
        if set(values) != known:
            raise ValueError(
                f"{path}: unknown keys {sorted(set(values) - known)}, missing keys "
                f"{sorted(known - set(values))}"
            )
        return cls(**values)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")
