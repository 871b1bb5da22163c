"""Models on the MoE layer: a small byte-level language model, its checkpoint and its training."""

from .checkpoint import default_directory, from_pretrained, save
from .config import ModelConfig
from .generate import generate
from .lm import MoELM, bits_per_byte, prefill

__all__ = [
    "MoELM",
    "ModelConfig",
    "bits_per_byte",
    "default_directory",
    "from_pretrained",
    "generate",
    "prefill",
    "save",
]
