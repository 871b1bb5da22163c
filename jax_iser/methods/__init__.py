"""The ways to compute a layer: `method=` is a name of this table; a further one is an entry."""

from __future__ import annotations

from jax_iser.methods.base import Method
from jax_iser.methods.fused.layer import Fused
from jax_iser.methods.portable.layer import Portable

METHODS: dict[str, Method] = {
    "fused": Fused(),
    "portable": Portable(),
    "dense": Portable("dense"),
}
ALIASES = {"reference": "portable"}


def method_name(method: str) -> str:
    """The name in `METHODS` of what may be an alias; ValueError for anything else."""
    name = ALIASES.get(method, method)
    if name not in METHODS:
        raise ValueError(f"method={method!r} is not one of {', '.join(METHODS)}")
    return name


def find_method(method: str) -> Method:
    """The method of a name or an alias; ValueError for anything else."""
    return METHODS[method_name(method)]
