"""jax_iser: expert-parallel MoE layers in JAX that balance their ranks at every call."""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING

from jax_iser import _extension as _extension  # registers its calls, where it is there
from jax_iser import _fork as _fork  # looks out for forks from here on
from jax_iser import _moved

if TYPE_CHECKING:
    from jax_iser.domain import Domain as Domain
    from jax_iser.domain import DomainConfig as DomainConfig
    from jax_iser.domain import DomainHandle as DomainHandle
    from jax_iser.errors import IserError as IserError
    from jax_iser.experts.activation import Activation as Activation
    from jax_iser.experts.formats.float8_block128 import dequantize_fp8 as dequantize_fp8
    from jax_iser.experts.formats.float8_block128 import quantize_fp8 as quantize_fp8
    from jax_iser.experts.weights import ExpertWeights as ExpertWeights
    from jax_iser.layer import moe_layer as moe_layer
    from jax_iser.methods.fused.fused_moe import fused_moe as fused_moe
    from jax_iser.methods.fused.plan import plan as plan
    from jax_iser.methods.fused.start import start as start
    from jax_iser.plan import Plan as Plan
    from jax_iser.plan import plan_counts as plan_counts
    from jax_iser.shared_expert import shared_expert as shared_expert

__version__ = "0.1.0"

# Public name -> the module that has it, imported when the name is first used.
PUBLIC = {
    "Activation": "jax_iser.experts.activation",
    "Domain": "jax_iser.domain",
    "DomainConfig": "jax_iser.domain",
    "DomainHandle": "jax_iser.domain",
    "ExpertWeights": "jax_iser.experts.weights",
    "IserError": "jax_iser.errors",
    "Plan": "jax_iser.plan",
    "dequantize_fp8": "jax_iser.experts.formats.float8_block128",
    "fused_moe": "jax_iser.methods.fused.fused_moe",
    "moe_layer": "jax_iser.layer",
    "plan": "jax_iser.methods.fused.plan",
    "plan_counts": "jax_iser.plan",
    "quantize_fp8": "jax_iser.experts.formats.float8_block128",
    "shared_expert": "jax_iser.shared_expert",
    "start": "jax_iser.methods.fused.start",
}
__all__ = [*PUBLIC]


class _Package(types.ModuleType):
    """`jax_iser` itself: some functions in it have the names of its modules."""

    def __setattr__(self, name, value):
        # Importing jax_iser.plan sets the name `plan` here, which is the function's.
        if not (name in PUBLIC and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


def __getattr__(name: str):
    if name in PUBLIC:
        value = getattr(importlib.import_module(PUBLIC[name]), name)
    elif name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    else:
        try:
            value = importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *PUBLIC, "models", "nnx"})


_moved.install()
sys.modules[__name__].__class__ = _Package
