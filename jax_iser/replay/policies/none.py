"""No balancing: every route runs on its expert's home rank."""

from __future__ import annotations

import dataclasses

import numpy as np

from jax_iser.replay.batch import Batch, Outcome, no_copies
from jax_iser.replay.policies.base import Policy


@dataclasses.dataclass
class Unbalanced(Policy):
    """What an expert-parallel layer does without any of this."""

    name = "none"

    def plan(self, batch: Batch) -> Outcome:
        empty = np.empty(0, np.int32)
        quota = np.empty((0, batch.num_ranks), np.int32)
        return no_copies(batch, empty, empty, quota, batch.load_before)
