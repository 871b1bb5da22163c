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
    "jax_iser.groups": ("jax_iser.plan.groups",),
    "jax_iser.planner": ("jax_iser.plan", "jax_iser.methods.fused.plan", "jax_iser.limits"),
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


def install() -> None:
    """Makes the old names importable; once for all."""
    if not any(isinstance(finder, _OldNames) for finder in sys.meta_path):
        sys.meta_path.append(_OldNames())
