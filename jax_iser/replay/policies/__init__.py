"""Policies by name. A new one is a file with a `Policy` dataclass, added to the table below."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax_iser.replay.policies import own
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


class PolicyMaker:
    """Makes policies of one class with the settings of a command line.

    Attributes:
      label: the policy as the command line names it.
      takes: the fields that a caller may still set.
      needs_totals: as of `Policy`.
    """

    def __init__(self, cls: type[Policy], settings: Sequence[str]):
        self._cls = cls
        self._kinds = {f.name: type(f.default) for f in dataclasses.fields(cls)}
        self._given = dict(_setting(cls, self._kinds, setting) for setting in settings)
        self.label = ":".join([cls.name, *settings])
        self.takes = frozenset(self._kinds) - set(self._given)
        self.needs_totals = cls.needs_totals

    def __call__(self, **fields) -> Policy:
        """A policy with more fields; those that it lacks are left out."""
        known = {name: value for name, value in fields.items() if name in self._kinds}
        return self._cls(**known | self._given)


def parse_policy(text: str) -> PolicyMaker:
    """A maker of policies from `name[:field=value]...`, or from `path/to/file.py[:field=value]...`.

    Raises:
      ValueError: on a name, a field or a value that does not exist, with those that do.

    Example:
      >>> parse_policy("p2p:copies_per_owner=2")(slots=3)
      PointToPoint(slots=3, copies_per_owner=2)
    """
    name, *settings = text.split(":")
    cls = own.load(name) if name.endswith(".py") else POLICIES.get(name)
    if cls is None:
        raise ValueError(f"policy {name!r} is not one of {', '.join(POLICIES)} or a .py file")
    make = PolicyMaker(cls, settings)
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
