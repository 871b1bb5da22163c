"""How the XLA FFI calls are made."""

from __future__ import annotations

import jax
import numpy as np

from jax_iser._extension import CALLS

TARGETS = {name: f"jax_iser.{name}" for name in CALLS}
SHARED_EXPERT = "jax_iser.shared_expert"  # on GPUs alone


def call(name, config, results, *operands, aliases=None):
    """Calls an op of a Domain of `config`, the one attribute: all else is an operand."""
    op = jax.ffi.ffi_call(TARGETS[name], results, input_output_aliases=aliases or {})
    return op(*operands, config=np.int64(config.digest))


def varying_like(operand, results):
    """Results of a call, marked as differing along the mesh axes that the operand differs along.

    `shard_map` checks such marks, and a call's results come without. What is alike on all ranks
    (a plan but for its slots) stays unmarked.
    """
    axes = tuple(jax.typeof(operand).manual_axis_type.varying)
    return [jax.lax.pcast(result, axes, to="varying") if axes else result for result in results]
