"""The interface of a policy, and how one is named on a command line."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from jax_iser.limits import MAX_HELPER_SLOTS as MAX_SLOTS
from jax_iser.replay.batch import Batch, Outcome


@dataclasses.dataclass
class Policy:
    """Decides, for each plan of a batch, where the routes of which experts run.

    A policy is a dataclass in a file of its own: fields are its knobs, settable as
    `name:field=value`. `plan` is called with consecutive batches of the same layers in order, so an
    instance may keep what it learnt; each worker thread has an instance of its own for its layers.

    Attributes:
      name: what a command line calls it.
      needs_totals: whether `fit` must see the whole trace first.
      slots: helper slots per rank.
    """

    name: ClassVar[str] = ""
    needs_totals: ClassVar[bool] = False

    slots: int = 4

    def __post_init__(self):
        self.check("slots", self.slots, 0, MAX_SLOTS)

    def check(self, name: str, value: int, low: int, high: int = 2**31 - 1) -> None:
        """Raises ValueError where a setting is outside its range."""
        if not low <= value <= high:
            raise ValueError(f"{self.name}:{name}={value} is outside {low} to {high}")

    def fit(self, totals) -> None:
        """Is given the trace's routes of this instance's layers, `[L, E] i64`, if asked for."""

    def plan(self, batch: Batch) -> Outcome:
        """Answers a batch; see `Outcome` for what must hold."""
        raise NotImplementedError

    def measure(self, batch: Batch) -> dict[str, np.ndarray] | None:
        """All figures of a `metrics.Meter`, `[N]` each, where there is a short cut to them."""
        return None
