"""What a method is, and what all of them check alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import jax

from jax_iser.domain.handle import DomainHandle
from jax_iser.experts.activation import Activation
from jax_iser.experts.weights import ExpertWeights
from jax_iser.plan.types import Plan

BALANCES = ("haloq", "none")


class Method(Protocol):
    """A way to compute a layer on one device, inside or outside `shard_map`: see `moe_layer`.

    Attributes:
      needs_domain: whether it computes in a Domain; others read a handle for its sizes alone.
      spans_ranks: whether experts may lie on several devices, along `axis_name`.
    """

    needs_domain: bool
    spans_ranks: bool

    def __call__(
        self,
        x: jax.Array,
        topk_ids: jax.Array,
        topk_weights: jax.Array,
        weights: ExpertWeights,
        domain: DomainHandle | None,
        *,
        layer,
        weights_version,
        shared_expert: Callable[[jax.Array], jax.Array] | None,
        balance: str,
        axis_name: str | None,
        weight_format: str | None,
        activation: str | Activation | None,
    ) -> tuple[jax.Array, Plan]:
        """`(y [tokens, D] of x's dtype, Plan)`."""


def check_balance(balance) -> None:
    """Raises ValueError for what is no way to balance."""
    if balance not in BALANCES:
        raise ValueError(f"balance={balance!r} is not one of {', '.join(BALANCES)}")


def check_experts_of(config, weight_format, activation) -> None:
    """Raises ValueError where a call names another weight format or activation than the Domain."""
    if activation is not None:
        activation = Activation.of(activation)
    for name, found in (("weight_format", weight_format), ("activation", activation)):
        expected = getattr(config, name)
        if found not in (None, expected):
            raise ValueError(
                f"{name}={found!r}, but the Domain was made with {name}={expected!r}; leave it "
                "out, or make a Domain with it"
            )
