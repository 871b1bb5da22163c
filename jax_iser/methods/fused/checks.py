"""What the calls of a Domain take: errors that name both values and the remedy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_iser.domain.handle import DomainHandle
from jax_iser.methods.base import check_balance


def as_i32(name: str, value) -> jax.Array:
    """An operand that is one integer, as i32; TypeError for anything else, such as 1.5 or True."""
    scalar = jnp.asarray(value)
    if scalar.ndim != 0 or not jnp.issubdtype(scalar.dtype, jnp.integer):
        what = f"{scalar.dtype} of shape {scalar.shape}" if scalar.ndim else repr(value)
        raise TypeError(f"{name} is {what}, expected one integer; it may be a traced i32 scalar")
    return scalar.astype(jnp.int32)


def check_layer(layer, num_layers: int) -> jax.Array:
    """The layer as i32; ValueError where it is known to be outside `num_layers`."""
    is_known = isinstance(layer, (int, np.integer)) and not isinstance(layer, bool)
    if is_known and not 0 <= layer < num_layers:
        raise ValueError(
            f"layer={layer} is outside the Domain's num_layers={num_layers}; make the Domain with "
            "a larger num_layers, or number the layers from 0"
        )
    return as_i32("layer", layer)


def check_start_arguments(x, topk_ids, weights, domain, balance) -> None:
    """Raises ValueError or TypeError, naming both values, where operands do not fit."""
    check_handle(domain)
    check_balance(balance)
    config = domain.config
    if domain.words.shape[0] != 1:
        raise ValueError(
            f"the handle has {domain.words.shape[0]} rows, expected this device's one; call inside "
            "shard_map with in_specs PartitionSpec(axis) for the handle"
        )
    check_tokens("x", x, config.hidden_size, config, config.dtype)
    check_tokens("topk_ids", topk_ids, config.top_k, config, "int32")
    if x.shape[0] != topk_ids.shape[0]:
        raise ValueError(f"x has {x.shape[0]} tokens, topk_ids has {topk_ids.shape[0]}")
    check_weights(weights, config)


def check_handle(domain) -> None:
    """Raises TypeError, with the remedy, for what is no `DomainHandle`."""
    if not isinstance(domain, DomainHandle):
        raise TypeError(
            f"domain is a {type(domain).__name__}, expected a DomainHandle; pass domain.handle"
        )


def check_tokens(name, array, width, config, dtype) -> None:
    """Checks `[ranks_per_device * tokens, width]` of `dtype` against the Domain's sizes."""
    if array.ndim != 2 or array.shape[1] != width:
        raise ValueError(f"{name} has shape {array.shape}, the Domain expects [tokens, {width}]")
    if array.dtype != jnp.dtype(dtype):
        raise TypeError(f"{name} is {array.dtype}, the Domain expects {dtype}; cast it")
    ranks = config.ranks_per_device
    if array.shape[0] % ranks:
        raise ValueError(
            f"{name} has {array.shape[0]} rows on a device, not divisible by ranks_per_device="
            f"{ranks}; pad them to {array.shape[0] + -array.shape[0] % ranks} and drop the outputs "
            "of the rows added (topk_ids of -1 cost nothing)"
        )
    if array.shape[0] // ranks > config.max_tokens_per_rank:
        raise ValueError(
            f"{name} brings {array.shape[0] // ranks} tokens per rank, but the Domain was made for "
            f"max_tokens_per_rank={config.max_tokens_per_rank}; make a larger Domain"
        )


def check_weights(weights, config) -> None:
    """Checks the planes of one device's experts against the Domain's sizes."""
    arrays, layouts = weights.planes, config.bundle.planes
    if len(arrays) != len(layouts):
        found, remedy = ("biases", True) if weights.biases else ("no biases", False)
        raise ValueError(
            f"the experts have {found}, the Domain was made with expert_biases="
            f"{config.expert_biases}; make it with expert_biases={remedy}, or change the weights"
        )
    for array, plane in zip(arrays, layouts, strict=True):
        _check_plane(array, plane, config)
    stacks = {
        array.shape[0] if array.ndim > plane.num_dims else None
        for array, plane in zip(arrays, layouts, strict=True)
    }
    shapes = f"{', '.join(p.name for p in layouts)} have shapes {[a.shape for a in arrays]}"
    if len(stacks) > 1:
        raise ValueError(f"{shapes}: stack all of them over the same number of layers, or none")
    if stacks == {0}:
        raise ValueError(
            f"{shapes}: they are stacked over 0 layers; stack those of one layer or more"
        )


def _check_plane(array, plane, config):
    if array.dtype != jnp.dtype(plane.array_dtype):
        raise TypeError(
            f"{plane.name} is {array.dtype}, the Domain expects {plane.array_dtype}; "
            + _dtype_remedy(array, plane, config)
        )
    shape = (config.ranks_per_device * config.num_home, *plane.array_shape)
    if array.ndim - len(shape) not in (0, 1) or array.shape[-len(shape) :] != shape:
        raise ValueError(
            f"{plane.name} has shape {array.shape}, the Domain expects {shape} on each device "
            "(with a leading layer axis when stacked)"
        )


def _dtype_remedy(array, plane, config):
    if plane.array_dtype == "uint8":
        return (
            f'weights of weight_format="{config.weight_format}" are planes of '
            "jax_iser.quantize_fp8: convert them once"
        )
    if array.dtype == jnp.uint8:
        return (
            'make the Domain with weight_format="float8_block128" if these are planes of '
            "quantize_fp8"
        )
    return "cast it"
