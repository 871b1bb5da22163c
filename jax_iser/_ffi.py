"""Registration of the XLA FFI calls, and the one place for differences between jax versions."""

from __future__ import annotations

import jax
import numpy as np

from jax_iser import _iser

try:
    from jax_iser import _iser_cuda
except ImportError:  # a build for CPUs alone
    _iser_cuda = None

TARGETS = {name: f"jax_iser.{name}" for name in ("start", "fused_moe", "plan")}
SHARED_EXPERT = "jax_iser.shared_expert"  # on GPUs alone


def _register_type(name, type_info):
    """Registers a type that handlers keep state in: it has to be known before they are."""
    from jax._src.lib import xla_client

    # What is registered before the CPU client exists waits for it, targets ahead of types, which
    # the client refuses. With its handler set now, types need not wait; the client sets it again.
    xla_client.register_custom_type_handler("cpu", xla_client._xla.register_custom_type)
    jax.ffi.register_ffi_type(name, type_info, platform="cpu")


def _register():
    _register_type("jax_iser.CallSite", _iser.call_site_type())
    calls = _iser.cpu_calls()
    for name, target in TARGETS.items():
        jax.ffi.register_ffi_target(target, calls[name], platform="cpu")
    if _iser_cuda is not None:
        for name, call in _iser_cuda.cuda_calls().items():
            jax.ffi.register_ffi_target(f"jax_iser.{name}", call, platform="CUDA")


_register()


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


def has_started_jax() -> bool:
    """Whether this process has clients of devices, and so their threads."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def key_value_client():
    """The key-value client of `jax.distributed`, or None in a single process."""
    from jax._src import distributed

    return distributed.global_state.client
