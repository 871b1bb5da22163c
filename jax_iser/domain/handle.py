"""What programs take of a Domain."""

from __future__ import annotations

import dataclasses

import jax
from jax.sharding import NamedSharding

from jax_iser import _fork
from jax_iser.domain.config import DomainConfig


@dataclasses.dataclass(frozen=True)
class DomainHandle:
    """What a program takes of a Domain: an argument of the jitted function, never a constant.

    Attributes:
      words: `[devices, 4] u32`, sharded over the Domain's axis: id, first rank of the device,
        a mark of the process, 0.
      config: the Domain's `DomainConfig`, static.
    """

    words: jax.Array
    config: DomainConfig

    @property
    def devices(self) -> list | None:
        """The Domain's, in rank order; None in a traced program, which does not know them."""
        if isinstance(self.words, jax.core.Tracer):
            return None
        sharding = getattr(self.words, "sharding", None)
        return list(sharding.mesh.devices.flat) if isinstance(sharding, NamedSharding) else None


# A library that meets a handle in a checkpoint shows its key in errors: here the remedy.
_HANDLE_KEY = "not_a_weight__save_nnx_state_of_jax_iser_nnx_WEIGHTS"


def _flatten_handle(handle):
    # Every call of a program comes by here: in a forked child it would never end.
    _fork.refuse()
    return (handle.words,), handle.config


jax.tree_util.register_pytree_with_keys(
    DomainHandle,
    lambda handle: (((jax.tree_util.GetAttrKey(_HANDLE_KEY), handle.words),), handle.config),
    lambda config, leaves: DomainHandle(leaves[0], config),
    _flatten_handle,
)
