"""jax_iser: expert-parallel MoE layers in JAX that balance their ranks at every call."""

try:
    from jax_iser import _iser as _iser
except ImportError as error:
    raise ImportError(
        f"jax_iser's extension could not be loaded ({error}). In a source tree it has to be built: "
        "install the package and start Python in another folder, or see docs/building.md for an "
        "in-place build"
    ) from error

from jax_iser.config import DomainConfig as DomainConfig
from jax_iser.domain import Domain as Domain
from jax_iser.domain import DomainHandle as DomainHandle
from jax_iser.errors import IserError as IserError
from jax_iser.experts.activation import Activation as Activation
from jax_iser.experts.formats.float8_block128 import dequantize_fp8 as dequantize_fp8
from jax_iser.experts.formats.float8_block128 import quantize_fp8 as quantize_fp8
from jax_iser.experts.weights import ExpertWeights as ExpertWeights
from jax_iser.fused_moe import fused_moe as fused_moe
from jax_iser.layer import moe_layer as moe_layer
from jax_iser.planner import Plan as Plan
from jax_iser.planner import plan as plan
from jax_iser.planner import plan_counts as plan_counts
from jax_iser.replication import start as start
from jax_iser.shared_expert import shared_expert as shared_expert

__version__ = "0.1.0"

_LAZY = ("models", "nnx")  # they import Flax, which callers of moe_layer need not wait for


def __getattr__(name):
    if name in _LAZY:
        import importlib

        return importlib.import_module(f"jax_iser.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *_LAZY})
