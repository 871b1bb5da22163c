"""The compiled extensions, and the registration of their XLA FFI calls.

Programs that were compiled or exported before find the calls by name, so that they are registered
when jax_iser is imported. Where there is no extension everything else still works: plain JAX, the
references, replays. What does need it fails at its first use, with the remedy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from jax_iser.errors import MissingExtensionError


class _Missing:
    """Stands for an extension that could not be loaded."""

    def __init__(self, error: ImportError):
        self._error = error

    def __getattr__(self, name: str):
        if name.startswith("__"):  # inspection, not use
            raise AttributeError(name)
        raise MissingExtensionError(
            f"jax_iser's extension could not be loaded ({self._error}). In a source tree it has to "
            "be built: install the package and start Python in another folder, or see "
            'docs/building.md for an in-place build. Without it use method="portable"'
        ) from self._error


if TYPE_CHECKING:
    from jax_iser import _iser as iser

    iser_cuda: Any
else:
    try:
        from jax_iser import _iser as iser
    except ImportError as error:
        iser = _Missing(error)
    try:
        from jax_iser import _iser_cuda as iser_cuda
    except ImportError:  # a build for CPUs alone
        iser_cuda = None

CALLS = ("start", "fused_moe", "plan")


def is_loaded() -> bool:
    """Whether the extension is there."""
    return not isinstance(iser, _Missing)


def _register_type(name, type_info):
    """Registers a type that handlers keep state in: it has to be known before they are."""
    from jax._src.lib import xla_client

    # What is registered before the CPU client exists waits for it, targets ahead of types, which
    # the client refuses. With its handler set now, types need not wait; the client sets it again.
    xla_client.register_custom_type_handler("cpu", xla_client._xla.register_custom_type)
    jax.ffi.register_ffi_type(name, type_info, platform="cpu")


def _register():
    _register_type("jax_iser.CallSite", iser.call_site_type())
    calls = iser.cpu_calls()
    for name in CALLS:
        jax.ffi.register_ffi_target(f"jax_iser.{name}", calls[name], platform="cpu")
    if iser_cuda is not None:
        for name, call in iser_cuda.cuda_calls().items():
            jax.ffi.register_ffi_target(f"jax_iser.{name}", call, platform="CUDA")


if is_loaded():
    _register()
