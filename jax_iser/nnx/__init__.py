"""A Flax NNX module of the MoE layer, its Domain, and weights with Hugging Face's names."""

from jax_iser.nnx.attach import attach as attach
from jax_iser.nnx.attach import place as place
from jax_iser.nnx.hf import load_hf as load_hf
from jax_iser.nnx.moe import MoE as MoE
from jax_iser.nnx.telemetry import balanced_routing as balanced_routing
from jax_iser.nnx.telemetry import plan_telemetry as plan_telemetry
from jax_iser.nnx.variables import EXPERT_PLANES as EXPERT_PLANES
from jax_iser.nnx.variables import WEIGHTS as WEIGHTS
from jax_iser.nnx.variables import AttachedDomain as AttachedDomain
from jax_iser.nnx.variables import AttachedLayer as AttachedLayer
from jax_iser.nnx.variables import ExpertBias as ExpertBias
from jax_iser.nnx.variables import ExpertPlane as ExpertPlane
from jax_iser.nnx.variables import Fp8Plane as Fp8Plane
from jax_iser.nnx.variables import RoutedBias as RoutedBias
