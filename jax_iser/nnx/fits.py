"""Whether a Domain and a call fit an `nnx.MoE`: errors that name both values and the remedy."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from jax_iser.domain.config import DTYPES, DomainConfig
from jax_iser.methods import find_method

# What a module and its Domain have alike.
_FIELDS = dict.fromkeys(
    ("num_experts", "top_k", "hidden_size", "intermediate_size"), "of the model's sizes"
) | dict.fromkeys(("weight_dtype", "activation", "expert_biases"), "of the model's experts")


def check_module(module, handle, name):
    config = handle.config
    for field, remedy in _FIELDS.items():
        if getattr(module, field) != getattr(config, field):
            raise ValueError(
                f"the Domain was made for {field}={getattr(config, field)}, {name} has "
                f"{getattr(module, field)}; make a Domain {remedy}"
            )
    if module.dtype is not None and find_method(module.method).needs_domain:
        check_dtype(module, jnp.dtype(module.dtype), config, name)
    check_devices(module, handle, name)


def stack_size(module) -> int | None:
    """Layers that the expert planes of a module are stacked over; None where they are not."""
    gate = module.gate.get_value()
    return gate.shape[0] if gate.ndim > module.layout().planes[0].num_dims else None


def unstacked(handle):
    """A handle that `attach` gave to a stacked module, as one layer takes it."""
    if handle.words.ndim == 2:
        return handle
    return dataclasses.replace(handle, words=handle.words[0])


def check_variables(module):
    """Weights have the shapes of the module's sizes, whatever was restored or assigned."""
    e, d, i = module.num_experts, module.hidden_size, module.intermediate_size
    expected: dict[str, tuple[int, ...]] = {"router": (e, d)}
    expected |= {plane.name: (e, *plane.array_shape) for plane in module.layout().planes}
    optional: dict[str, tuple[int, ...]]
    optional = {"router_bias": (e,), "routed_bias": (e,), "shared_expert_gate": (1, d)}
    for name, shape in optional.items():
        if getattr(module, name) is not None:
            expected[name] = shape
    num_stacked = stack_size(module)
    for name, shape in expected.items():
        found = getattr(module, name).get_value().shape
        is_stacked = len(found) == len(shape) + 1 and found[0] == num_stacked
        if found != shape and not (is_stacked and found[1:] == shape):
            raise ValueError(
                f"{name} has shape {found}, this MoE expects {shape} (num_experts={e}, "
                f"hidden_size={d}, intermediate_size={i}); assign or restore weights of its sizes"
            )
    if num_stacked == 0:
        raise ValueError("this MoE is stacked over 0 layers; stack one layer or more")


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
    """Equal devices in equal order, where the handle's are known, along the module's axis."""
    mesh, theirs, config = module.mesh, handle.devices, handle.config
    if mesh is None:
        if config.num_devices > 1:
            raise ValueError(
                f"the Domain spans {config.num_devices} devices, {name} has no mesh; make "
                "it with the Domain's"
            )
        return
    others = {axis: size for axis, size in mesh.shape.items() if axis != module.axis and size > 1}
    remedy = "make both with one mesh" + (
        f", without the other axes {others}: one program drives one expert-parallel group"
        if others
        else f': Domain(mesh, "{module.axis}", ...) with the mesh of the MoE'
    )
    if not isinstance(mesh, jax.sharding.AbstractMesh):
        ours = list(mesh.devices.flat)
        if theirs not in (ours, None) or config.num_devices != len(ours):
            found = config.num_devices if theirs is None else _names(theirs)
            raise ValueError(
                f"the Domain is on devices {found}, {name} on {_names(ours)}; {remedy}"
            )
    if mesh.shape[module.axis] != config.num_devices or others:
        raise ValueError(
            f"the Domain spans {config.num_devices} devices, {name} {mesh.shape[module.axis]} of "
            f'axis "{module.axis}" of the mesh {dict(mesh.shape)}; {remedy}'
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
