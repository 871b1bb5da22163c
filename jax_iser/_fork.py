"""What a forked child may do: nothing with the Domains, or the JAX, of its parent.

A child has the memory of its parent, some of it shared, but none of its threads. What waits for one
of them waits for ever, so that calls raise instead, and nothing here may write what is shared.
"""

from __future__ import annotations

import os

from jax_iser._jax_compat import has_started_jax

_parent: int | None = None  # that had started JAX before it forked this process


def _note():
    global _parent
    if has_started_jax():
        _parent = os.getppid()


os.register_at_fork(after_in_child=_note)


def is_child() -> bool:
    """Whether this process was forked from one that had started JAX."""
    return _parent is not None


def refuse() -> None:
    """Raises RuntimeError in such a child."""
    if _parent is not None:
        raise RuntimeError(
            f"this process was forked from process {_parent} after that one had started JAX; the "
            "threads of JAX and of its Domains do not exist here, and what waits for them would "
            'hang: start processes by multiprocessing\'s "spawn" or "forkserver", or fork before '
            "the first use of JAX"
        )
