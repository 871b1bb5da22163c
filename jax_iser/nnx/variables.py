"""Kinds of variables of the MoE module, and filters that select them."""

from __future__ import annotations

import numpy as np
from flax import nnx


class ExpertPlane(nnx.Param):
    """A plane of expert weights `[num_experts, rows, columns]`; trained like any `nnx.Param`."""


class ExpertBias(ExpertPlane):
    """Biases of all experts, `[num_experts, size] f32`; trained like any `nnx.Param`."""


class Fp8Plane(nnx.Variable):
    """A plane of expert weights `[num_experts, bytes] u8` of `quantize_fp8`: not trained."""

    def set_value(self, value, **options):
        """Refuses weights that are not quantised: as bytes they would mean nothing."""
        if getattr(value, "dtype", np.uint8) != np.uint8:
            raise TypeError(
                f"weights of {value.dtype} are assigned to a plane of FP8 bytes; assign what "
                "jax_iser.quantize_fp8 makes of them, or read them by jax_iser.nnx.load_hf"
            )
        super().set_value(value, **options)


class RoutedBias(nnx.Variable):
    """The router's selection bias `[num_experts] f32`: moved by a balancing rule, no gradient."""


class AttachedDomain(nnx.Variable):
    """The handle of a `jax_iser.Domain`; an argument of every compiled program that uses it."""


class AttachedLayer(AttachedDomain):
    """The layers `[L] i32` of a module that is stacked for a scan: its numbers in the Domain."""


# Of nnx.state: all that a checkpoint holds. A handle means nothing to another process.
WEIGHTS = nnx.Not(AttachedDomain)
# Of nnx.StateAxes: weights that a scan over stacked modules passes whole, not layer by layer.
EXPERT_PLANES = nnx.Any(nnx.OfType(ExpertPlane), nnx.OfType(Fp8Plane))
