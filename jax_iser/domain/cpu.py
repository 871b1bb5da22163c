"""A Domain on the CPU devices of one host, as `Domain` drives it."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jax_iser._extension import iser
from jax_iser.domain import rendezvous
from jax_iser.domain.options import options_of, shape_of


class CpuRuntime:
    """The memory and the threads behind a Domain.

    Attributes:
      id: names the Domain in handles.
      members: the processes.
    """

    def __init__(self, config, devices, meeting):
        self._config = config
        is_multi_process = not meeting.is_alone
        shape, options = shape_of(config, is_multi_process), options_of(config, is_multi_process)
        self.members = rendezvous.connect(
            devices, config.ranks_per_device, shape.segment_bytes, config, meeting
        )
        self._num_placed = 0
        try:
            self.id = iser.create_domain(options, self.members.specs, self.members.local)
        except BaseException as error:
            meeting.tell(error)  # before the sockets close, so that peers learn why
            self.members.close()
            raise

    def publish(self) -> None:
        """Nothing to do: calls find the Domain once it is made."""

    def wait_idle(self, wait_s: float) -> bool:
        """Whether all calls ended within so many seconds."""
        return iser.wait_idle(self.id, wait_s)

    def leave(self) -> None:
        """Calls of other processes that need this one fail from now on."""
        iser.leave_domain(self.id)

    def close(self, wait_s: float) -> None:
        """Fails what does not end within `wait_s`, then releases everything."""
        iser.close_domain(self.id, wait_s)
        self.members.close()

    def describe_error(self) -> dict[str, Any]:
        """Fields of an `IserError`, with its `text`; `code` is 0 for none."""
        return iser.describe_error(self.id)

    def busy(self, reset: bool) -> tuple[np.ndarray, np.ndarray]:
        """As `Domain.busy`."""
        ns, rows = iser.read_busy(self.id, reset)
        shape = (self._config.num_layers, -1)
        return np.reshape(ns, shape) / 1e9, np.reshape(rows, shape)

    def timelines(self) -> list[tuple]:
        """Rows of `Timeline`."""
        return iser.read_timelines(self.id)

    def helper(self, rank: int, bank: int, helper_idx: int) -> bytes:
        """Bytes of a helper slot."""
        return iser.read_helper(self.id, rank, bank, helper_idx)

    def stall(self, rank: int, stage: int, seconds: float) -> None:
        """Delays the rank's next arrival."""
        iser.stall(self.id, rank, stage, seconds)

    def place(self, array: np.ndarray | jax.Array, sharding) -> jax.Array:
        """As `Domain.place`, for one array."""
        if len(self.members.specs) == 1:
            return jax.device_put(array, sharding)
        self._num_placed += 1
        return self.members.place(self.id, array, sharding, self._num_placed)
