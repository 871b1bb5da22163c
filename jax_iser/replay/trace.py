"""What every trace offers to the replay: iterations of counts for a number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np


class Cut(NamedTuple):
    """A trace cut for `P` ranks.

    Attributes:
      num_iterations: iterations that `counts` yields at most.
      tokens_per_rank: tokens of a rank in an iteration, 0 where the trace recorded counts.
      notes: what was assumed, in sentences for the reader of a result.
      counts: yields `[L, P, E] i32` for each iteration, in order.
    """

    num_iterations: int
    tokens_per_rank: int
    notes: tuple[str, ...]
    counts: Iterator[np.ndarray]


class Trace(Protocol):
    """A source of routing: recorded, or made.

    Attributes:
      name: short, for tables.
      num_layers, num_experts: sizes `L`, `E`.
      top_k: experts of a token, 0 where unknown.
      notes: what was assumed in reading it.
    """

    name: str
    num_layers: int
    num_experts: int
    top_k: int
    notes: tuple[str, ...]

    def cut(self, num_ranks: int, tokens_per_rank: int) -> Cut:
        """Iterations for `num_ranks` ranks with `tokens_per_rank` tokens each."""
        ...
