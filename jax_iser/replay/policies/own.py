"""A policy from a user's file: the file is run, and what its policy answers is checked."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path

from jax_iser.replay.batch import Batch, Outcome, why_wrong
from jax_iser.replay.policies.base import Policy


def load(path: str) -> type[Policy]:
    """The one `Policy` that a file defines.

    Raises:
      ValueError: naming the file, where there is none or it cannot be run; and from the policy's
        `plan`, where it fails or answers what is no outcome of the batch.
    """
    own = _find(path)

    class Checked(own):  # type: ignore[misc, valid-type]
        def __init__(self, *args, **kwargs):
            with _told_of(path, own.__name__):
                super().__init__(*args, **kwargs)

        def fit(self, totals) -> None:
            with _told_of(path, "fit"):
                super().fit(totals)

        def plan(self, batch: Batch) -> Outcome:
            with _told_of(path, "plan"):
                outcome = super().plan(batch)
            if reason := why_wrong(batch, outcome, self.slots):
                raise ValueError(f"policy file {path}: plan answered {reason}")
            return outcome

    return Checked


@contextlib.contextmanager
def _told_of(path, what):
    """Turns whatever the file raises into a ValueError that names it."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"policy file {path}: {what} raised {_told(error)}") from error


def _find(path: str) -> type[Policy]:
    if not Path(path).is_file():
        raise ValueError(f"policy file {path} does not exist")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None  # the file is there and ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the file raises
        raise ValueError(f"policy file {path}: {_told(error)}") from error
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Policy)
        and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise ValueError(f"policy file {path} defines {len(found)} Policy classes, expected one")
    return found[0]


def _told(error):
    return f"{type(error).__name__}: {error}"
