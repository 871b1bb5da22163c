"""Whether a Domain and a call fit an `nnx.MoE`: errors that name both values and the remedy."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jax_iser import fp8
from jax_iser.config import DTYPES, DomainConfig


def check_module(module, handle, name):
    config = handle.config
    for field in ("num_experts", "top_k", "hidden_size", "intermediate_size", "weight_dtype"):
        if getattr(module, field) != getattr(config, field):
            raise ValueError(
                f"the Domain was made for {field}={getattr(config, field)}, {name} has "
                f"{getattr(module, field)}; make a Domain of the model's sizes"
            )
    if module.dtype is not None and module.method == "fused":
        check_dtype(module, jnp.dtype(module.dtype), config, name)
    check_devices(module, handle, name)
    gate = module.gate.get_value()
    if gate.ndim != (2 if fp8.is_fp8(gate) else 3):
        raise ValueError(
            f"{name} is stacked: its gate has shape {gate.shape}, and a handle has no such axis; "
            "detach it, and pass domain=domain.handle and layer= to its calls in nnx.scan"
        )


def check_layers(modules, config):
    for name, module in modules.items():
        if not 0 <= module.layer < config.num_layers:
            needed = 1 + max(each.layer for each in modules.values())
            raise ValueError(
                f"{name} has layer={module.layer}, outside the Domain's num_layers="
                f"{config.num_layers}; make the Domain with num_layers={needed}"
            )
    layers = [module.layer for module in modules.values() if module.method == "fused"]
    if config.resident and len(set(layers)) < len(layers):
        raise ValueError(
            f"the Domain keeps replicas by layer (resident=True), and modules share one: layers "
            f"{layers}; give each MoE its own layer="
        )


def check_dtype(module, dtype, config: DomainConfig, name):
    if dtype.name == config.dtype:
        return
    whose = "of its input" if module.dtype is None else "its dtype="
    remedy = f'give the MoE dtype="{config.dtype}"' + (" or cast x" if module.dtype is None else "")
    if dtype.name in DTYPES:
        remedy = f'make the Domain with dtype="{dtype.name}", or {remedy}'
    raise TypeError(
        f"{name} computes in {dtype.name} ({whose}), the Domain was made for dtype="
        f'"{config.dtype}"; {remedy}'
    )


def check_devices(module, handle, name):
    """Equal devices in equal order, where the handle's are known."""
    mesh, theirs = module.mesh, handle.devices
    if mesh is None:
        if handle.config.num_devices > 1:
            raise ValueError(
                f"the Domain spans {handle.config.num_devices} devices, {name} has no mesh; make "
                "it with the Domain's"
            )
        return
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return
    ours = list(mesh.devices.flat)
    if theirs == ours or (theirs is None and handle.config.num_devices == len(ours)):
        return
    others = {axis: size for axis, size in mesh.shape.items() if axis != module.axis and size > 1}
    found = handle.config.num_devices if theirs is None else _names(theirs)
    raise ValueError(
        f"the Domain is on devices {found}, {name} on {_names(ours)}; make both with one mesh"
        + (
            f", without the other axes {others}: one program drives one expert-parallel group"
            if others
            else f': Domain(mesh, "{module.axis}", ...) with the mesh of the MoE'
        )
    )


def _names(devices):
    return "[" + ", ".join(f"{device.platform}:{device.id}" for device in devices) + "]"


def check_alive(handle):
    words = handle.words
    is_array = isinstance(words, jax.Array) and not isinstance(words, jax.core.Tracer)
    if is_array and words.is_deleted():
        raise ValueError(
            "the Domain's handle was donated to a program and is gone; attach the Domain again, or "
            "donate none of its handles"
        )


def check_divisible(shape, num_devices, ranks_per_device, axis):
    num_tokens, num_ranks = math.prod(shape[:-1]), num_devices * ranks_per_device
    if num_tokens % num_ranks:
        padded = num_tokens + -num_tokens % num_ranks
        raise ValueError(
            f"x has shape {shape}: the number of tokens, {num_tokens}, is not divisible by the "
            f'{num_ranks} ranks of axis "{axis}" ({num_devices} devices, ranks_per_device='
            f"{ranks_per_device}); pad x to {padded} tokens and drop the outputs of the rows "
            "added, which are routed like any other and change none"
        )
