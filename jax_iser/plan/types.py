"""What a plan looks like: to a program, and to who plans counts on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import jax

OWNER_DIRECT, SAMI, RESIDENT = 0, 1, 2  # how a broadcast is copied


class Plan(NamedTuple):
    """What a layer call shows of its plan; alike on all ranks but for `route_slot`.

    Attributes:
      route_slot: `[tokens, top_k] i32`, physical slot of each route, -1 for padding.
      broadcasts: `[P*S, 6] i32`, rows in placement order: expert, owner, level, group index,
        helper index, how (0 owner-direct, 1 SAMI, 2 resident); unused rows -1.
      quota: `[P*S, P] i32`, routes of the row's expert by computing rank.
      num_broadcasts: `[] i32`, rows in use.
      load_before, load: `[P] i32`, routes by computing rank without and with the plan.
      status: `[] i32`, 0 when the call succeeded, else the code of the Domain's error.
      generation: `[] u32`, the Domain's counter of invocations.
    """

    route_slot: jax.Array
    broadcasts: jax.Array
    quota: jax.Array
    num_broadcasts: jax.Array
    load_before: jax.Array
    load: jax.Array
    status: jax.Array
    generation: jax.Array

    @classmethod
    def specs(cls, axis: str) -> Plan:
        """Its `PartitionSpec`s, for the `out_specs` of a `shard_map` over `axis`."""
        from jax.sharding import PartitionSpec

        return cls(PartitionSpec(axis), *[PartitionSpec()] * (len(cls._fields) - 1))


class CountsPlan(NamedTuple):
    """What HALO-Q decides from counts alone.

    Attributes:
      broadcasts: `[P*S, 6] i32`, rows in placement order: expert, owner, level, group index,
        helper index (local slot `H + helper index`), how (0 owner-direct, 1 SAMI, 2 resident);
        unused rows are -1.
      quota: `[P*S, P] i32`, routes of the row's expert that each rank computes; 0 for ranks that
        are not hosts (hosts are the group's members and the owner).
      num_broadcasts: rows in use.
      load_before: `[P] i32`, routes each rank would compute at home.
      load: `[P] i32`, routes each rank computes under the plan.
      target: the water level `T = ceil(sum(load) / P)`.
    """

    broadcasts: np.ndarray
    quota: np.ndarray
    num_broadcasts: int
    load_before: np.ndarray
    load: np.ndarray
    target: int


class PlanBatch(NamedTuple):
    """`plan_many`'s result: `CountsPlan`'s arrays with a leading axis, and the flow.

    Attributes:
      broadcasts: `[N, P*S, 6] i32`.
      quota: `[N, P*S, P] i32`.
      load_before, load: `[N, P] i32`.
      num_broadcasts, target: `[N] i32`.
      flow: `[N, P, P] i64`, routes of source s computed on r; None unless asked for.
    """

    broadcasts: np.ndarray
    quota: np.ndarray
    load_before: np.ndarray
    load: np.ndarray
    num_broadcasts: np.ndarray
    target: np.ndarray
    flow: np.ndarray | None
