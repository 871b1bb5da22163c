"""What jax has under private names, or differently by version."""

from __future__ import annotations


def has_started_jax() -> bool:
    """Whether this process has clients of devices, and so their threads."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def key_value_client():
    """The key-value client of `jax.distributed`, or None in a single process."""
    from jax._src import distributed

    return distributed.global_state.client
