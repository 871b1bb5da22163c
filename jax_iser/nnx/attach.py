"""`attach`: gives the MoE layers of a model their Domain, and their numbers in it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_iser.domain import Domain, DomainHandle, keep_open
from jax_iser.nnx import fits
from jax_iser.nnx.moe import MoE
from jax_iser.nnx.variables import AttachedDomain, AttachedLayer


def attach(model: nnx.Module, domain: Domain | DomainHandle | None) -> None:
    """Gives every `MoE` of `model` the handle of `domain` (a Domain or a handle; None detaches).

    The handle is a variable of the module: it travels into `nnx.jit` with the model's state, so a
    closed and remade Domain is attached again without recompilation. It means nothing to another
    process: attach a restored model again. The Domain stays alive until it is closed, even where
    the caller keeps no reference to it; a detached one does too.

    Layers without `layer=` are numbered from 0 in the order of `nnx.iter_graph` (attributes by
    name, lists by index), around the numbers that other layers were given. A module that
    `nnx.vmap` has stacked takes a number for each layer of the stack. Attach a model as a whole:
    each call numbers anew.

    Raises:
      ValueError: no MoE in the model, two with one `layer=`, a closed Domain, or one that was made
        for other sizes, fewer layers or other devices than a module has, naming both values.
      TypeError: a `domain` that is none, a model that is no NNX module, or another dtype.
    """
    handle = _handle_of(domain)
    modules = _modules_of(model)
    numbers = _number(modules)
    if handle is not None:
        for name, module in modules.items():
            fits.check_module(module, handle, name)
        _check_layers(modules, numbers, handle.config)
        keep_open(handle)
    for name, module in modules.items():
        _attach_one(module, handle, numbers[name])


def place(model: nnx.Module, domain: Domain) -> None:
    """Moves every `MoE`'s expert weights to where all processes of `domain` read them in place.

    For CPU Domains of several processes: without it, owners copy each bundle that other processes
    pull aside first. Elsewhere it is a plain placement over the mesh. All processes of the Domain
    call it. Weights that are assigned or updated later are not placed: call it again. `nnx.jit`
    gives a module its variables anew at each call; to keep placed ones, pass the module's state to
    `jax.jit` (`nnx.split`, `nnx.merge`).

    Raises:
      ValueError, TypeError: as `attach`, or weights that `Domain.place` refuses.
    """
    if not isinstance(domain, Domain):
        raise TypeError(f"domain is a {type(domain).__name__}, expected a jax_iser.Domain")
    handle = _handle_of(domain)
    modules = _modules_of(model)
    for name, module in modules.items():
        fits.check_module(module, handle, name)
    for module in modules.values():
        for variable in module.expert_variables().values():
            variable.set_value(domain.place(variable[...]))


def _modules_of(model) -> dict[str, MoE]:
    """The model's MoE modules by how errors name them."""
    modules = {
        "MoE " + ".".join(map(str, path)) if path else "this MoE": module
        for path, module in nnx.iter_graph(model)
        if isinstance(module, MoE)
    }
    if not modules:
        raise _no_module(model)
    return modules


def _attach_one(module, handle, number):
    if handle is None:
        module.domain = module.domain_layer = module.attached_as = None
        return
    module.attached_as, num_stacked = number, fits.stack_size(module)
    module.domain = AttachedDomain(_copy_of(handle, module, num_stacked))
    module.domain_layer = None
    if num_stacked is not None:
        module.domain_layer = AttachedLayer(number + jnp.arange(num_stacked, dtype=jnp.int32))


def _copy_of(handle, module, num_stacked):
    """A module's own: a program that is given a model to overwrite overwrites this.

    On the module's mesh, whose axes may be of another type than the Domain's; stacked with it.
    """
    words, mesh, spec = jnp.copy(handle.words), module.mesh, P(module.axis)
    if num_stacked is not None:
        words, spec = jnp.stack([words] * num_stacked), P(None, module.axis)
    if isinstance(mesh, jax.sharding.Mesh):
        words = jax.device_put(words, NamedSharding(mesh, spec))
    return dataclasses.replace(handle, words=words)


def _number(modules) -> dict[str, int]:
    """The first number of each module: the one it was made with, or the lowest free ones."""
    sizes = {name: fits.stack_size(module) or 1 for name, module in modules.items()}
    numbers: dict[str, int] = {}
    owners: dict[int, str] = {}
    for name, module in modules.items():
        if module.layer is None:
            continue
        numbers[name] = module.layer
        for number in range(module.layer, module.layer + sizes[name]):
            if number in owners:
                raise ValueError(
                    f"{name} has layer={module.layer}, and {owners[number]} is number {number} "
                    "too: they would share a helper bank and a row of busy(); give each MoE a "
                    "layer= of its own, or none, and attach numbers them"
                )
            owners[number] = name
    for name in modules:
        if name in numbers:
            continue
        first = 0
        while any(number in owners for number in range(first, first + sizes[name])):
            first += 1
        numbers[name] = first
        owners |= dict.fromkeys(range(first, first + sizes[name]), name)
    return numbers


def _check_layers(modules, numbers, config):
    last = {name: numbers[name] + (fits.stack_size(modules[name]) or 1) - 1 for name in modules}
    for name in modules:
        if last[name] >= config.num_layers:
            raise ValueError(
                f"{name} has layer={last[name]}, outside the Domain's num_layers="
                f"{config.num_layers}; make the Domain with num_layers={1 + max(last.values())}"
            )


def _handle_of(domain):
    if isinstance(domain, Domain):
        if not domain.is_open:
            raise ValueError("this Domain is closed; make a new one and attach that")
        domain = domain.handle
    if isinstance(domain, DomainHandle):
        fits.check_alive(domain)
    elif domain is not None:
        raise TypeError(
            f"domain is a {type(domain).__name__}, expected a jax_iser.Domain, its handle, or None "
            "to detach"
        )
    return domain


def _no_module(model):
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    if isinstance(model, nnx.Module):
        return ValueError(
            f"the model, a {kind}, has no jax_iser.nnx.MoE: nothing to attach; put one in place of "
            "its MoE layers first"
        )
    return TypeError(
        f"the model is a {kind}, expected a flax.nnx.Module with a jax_iser.nnx.MoE in it; from "
        "Flax Linen, which keeps no state in modules, call jax_iser.moe_layer"
    )
