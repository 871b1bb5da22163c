"""Policies by name. A new one is a file with a `Policy` dataclass, added to the table below."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from pathlib import Path

from jax_iser.replay.policies.all_rank import AllRank
from jax_iser.replay.policies.base import Policy
from jax_iser.replay.policies.greedy import OwnerGroups
from jax_iser.replay.policies.haloq import HaloQ
from jax_iser.replay.policies.none import Unbalanced
from jax_iser.replay.policies.point_to_point import CappedPointToPoint, PointToPoint
from jax_iser.replay.policies.static import Resplit, StaticPast, StaticWhole

POLICIES = {
    policy.name: policy
    for policy in (
        Unbalanced,
        HaloQ,
        OwnerGroups,
        AllRank,
        PointToPoint,
        CappedPointToPoint,
        StaticPast,
        StaticWhole,
        Resplit,
    )
}


def parse_policy(text: str) -> Callable[..., Policy]:
    """A maker of policies from `name[:field=value]...`, or from `path/to/file.py[:field=value]...`.

    The maker takes more fields as keywords (those that the policy lacks are left out) and has the
    attributes `label`, `needs_totals` and `fields`.

    Raises:
      ValueError: on a name, a field or a value that does not exist, with those that do.

    Example:
      >>> parse_policy("p2p:copies_per_owner=2")(slots=3)
      PointToPoint(slots=3, copies_per_owner=2)
    """
    name, *settings = text.split(":")
    cls = _load(name) if name.endswith(".py") else POLICIES.get(name)
    if cls is None:
        raise ValueError(f"policy {name!r} is not one of {', '.join(POLICIES)} or a .py file")
    kinds = {f.name: type(f.default) for f in dataclasses.fields(cls)}
    given = dict(_setting(cls, kinds, setting) for setting in settings)

    def make(**fields) -> Policy:
        return cls(**{k: v for k, v in fields.items() if k in kinds} | given)

    make.label = ":".join([cls.name, *settings])
    make.needs_totals, make.fields = cls.needs_totals, kinds
    make()  # a value that the policy itself refuses is refused here
    return make


def _setting(cls, kinds, setting):
    field, equals, value = setting.partition("=")
    if not equals or field not in kinds:
        raise ValueError(
            f"policy {cls.name!r} has no setting {setting!r}; it has "
            + ", ".join(f"{name}={kind.__name__}" for name, kind in kinds.items())
        )
    try:
        return field, kinds[field](value)
    except ValueError:
        raise ValueError(f"{cls.name}:{setting} is not of type {kinds[field].__name__}") from None


def _load(path: str) -> type[Policy]:
    """The one `Policy` that a user's file defines."""
    if not Path(path).is_file():
        raise ValueError(f"policy file {path} does not exist")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Policy)
        and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise ValueError(f"{path} defines {len(found)} Policy classes, expected one")
    return found[0]
