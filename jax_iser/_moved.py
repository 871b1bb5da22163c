"""Old names of this package's modules: they still work, with a warning."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings

# Old module -> the modules that have its names now.
MOVED = {
    "jax_iser.config": ("jax_iser.domain.config",),
    "jax_iser.fp8": ("jax_iser.experts.formats.float8_block128",),
    "jax_iser.fused_moe": ("jax_iser.methods.fused.fused_moe",),
    "jax_iser.groups": ("jax_iser.plan.groups",),
    "jax_iser.planner": ("jax_iser.plan", "jax_iser.methods.fused.plan", "jax_iser.limits"),
    "jax_iser.reference.fp8": ("jax_iser.reference.formats",),
    "jax_iser.reference.layer": ("jax_iser.methods.portable.layer",),
    "jax_iser.replication": (
        "jax_iser.methods.fused.start",
        "jax_iser.methods.fused.checks",
        "jax_iser.methods.base",
        "jax_iser.experts.weights",
    ),
}


class _OldNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of `MOVED`: each looks its names up in those that have them now."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in MOVED:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin="moved")

    def exec_module(self, module: types.ModuleType) -> None:
        old, new = module.__name__, MOVED[module.__name__]
        warnings.warn(
            f"{old} has moved: import from {' or '.join(new)}, or public names from jax_iser",
            DeprecationWarning,
            stacklevel=2,
        )
        homes = [importlib.import_module(name) for name in new]

        def find(name: str):
            for home in homes:
                if hasattr(home, name):
                    return getattr(home, name)
            raise AttributeError(f"module {old!r} has no attribute {name!r}")

        module.__doc__ = homes[0].__doc__
        module.__dict__["__getattr__"] = find
        module.__dict__["__dir__"] = lambda: sorted({name for home in homes for name in dir(home)})


def old_names(module: str, names: dict[str, str]):
    """A module's `__getattr__` for names that have moved: name -> the module that has it now."""

    def find(name: str):
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(
            f"{module}.{name} has moved: import it from {names[name]}",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(importlib.import_module(names[name]), name)

    return find


def install() -> None:
    """Makes the old names importable; once for all."""
    if not any(isinstance(finder, _OldNames) for finder in sys.meta_path):
        sys.meta_path.append(_OldNames())
