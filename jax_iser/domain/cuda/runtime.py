"""A Domain on GPUs, as `Domain` drives it. Needs the extension `_iser_cuda` and cuda-python."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import pathlib
import time
import warnings
from typing import Any

import jax
import numpy as np

from jax_iser import _extension
from jax_iser._extension import iser
from jax_iser.domain import rendezvous
from jax_iser.domain.config import DomainConfig
from jax_iser.domain.cuda import memory
from jax_iser.domain.cuda.driver import Devices
from jax_iser.domain.options import options_of

DEFAULT_COPY_SMS = 8
_ids = itertools.count(1)  # of this process: handles are its own
_BAD_HANDLE, _STAGING = 8, 1
_NO_EXTENSION = (
    "the Domain is on GPUs, but this build of jax_iser has no CUDA kernels; build it with "
    'ISER_CUDA=1 and nvcc (docs/building.md), or use method="portable"'
)


class CudaRuntime:
    """The memory of a Domain on this process's GPUs, and what their kernels keep there.

    Attributes:
      id: names the Domain in handles.
      members: the processes.
    """

    def __init__(self, config, devices, meeting):
        is_multi_process = not meeting.is_alone
        _check(config, is_multi_process)
        self._config, self.id = config, next(_ids)
        local = [d for d in devices if d.process_index == jax.process_index()]
        self._ordinals = [d.local_hardware_id for d in local]
        for ordinal in self._ordinals:
            _extension.iser_cuda.open_device(ordinal, iser.HANDLE_MARK)
        setup = _setup(config, is_multi_process)
        for ordinal in self._ordinals:
            _extension.iser_cuda.add_setup(ordinal, config.digest, setup)
        # Memory comes from the driver; the processes' memfds stay empty but for a page.
        self.members = rendezvous.connect(
            devices, config.ranks_per_device, lambda _: 1, config, meeting
        )
        try:
            self._memory = memory.allocate(Devices.of(local), setup.device_bytes())
        except BaseException as error:
            meeting.tell(error)  # before the sockets close, so that peers learn why
            self.members.close()
            raise
        try:
            self._parts = self._make_parts(setup)
        except BaseException as error:
            meeting.tell(error)
            self._release()
            raise

    def _make_parts(self, setup):
        segments = self._exchange()
        first = self._first_device()
        return [
            _extension.iser_cuda.CudaPart(
                ordinal=ordinal,
                setup=setup,
                id=self.id,
                sizes=self._config.digest,
                device=first + i,
                segments=segments,
            )
            for i, ordinal in enumerate(self._ordinals)
        ]

    def _first_device(self):
        return self.members.specs[self.members.local][1] // self._config.ranks_per_device

    def _exchange(self) -> list[int]:
        """Where each device's memory is mapped in this process, in rank order."""
        counts = [ranks // self._config.ranks_per_device for _, _, ranks, _ in self.members.specs]
        found = memory.exchange(self._memory, self.members, self._memory.segments, counts)
        return [segment.address for segment in itertools.chain(*found)]

    def publish(self) -> None:
        """From now on programs can name the Domain."""
        for part in self._parts:
            part.publish()

    def wait_idle(self, wait_s: float) -> bool:
        """Whether every GPU ran what was enqueued within so many seconds."""
        return all(part.wait_idle(wait_s) for part in self._parts)

    def leave(self) -> None:
        """Nothing to do: kernels that wait for this process end at their limit."""

    def close(self, wait_s: float) -> None:
        """Fails what does not end within `wait_s`, then releases everything."""
        if not self.wait_idle(wait_s):
            for part in self._parts:
                part.fail_closed(self._first_device() * self._config.ranks_per_device)
        deadline = time.monotonic() + wait_s + 10.0
        # Other calls may begin between two looks; one that has found the Domain must end first.
        while not all(part.remove() for part in self._parts):
            if time.monotonic() > deadline:
                warnings.warn("calls did not end; a Domain's memory is left behind", stacklevel=2)
                return
            time.sleep(0.001)
        self._release()

    def _release(self):
        self._memory.close()
        self.members.close()

    def describe_error(self) -> dict[str, Any]:
        """Fields of an `IserError`, with its `text`; `code` is 0 for none."""
        has_startup = self._config.startup_limit_s(len(self.members.specs) > 1)
        has_startup_limit = has_startup != self._config.timeout_s
        fields: dict[str, Any] = {}
        for part in self._parts:
            fields = part.describe_error(has_startup_limit)
            if fields["code"]:
                return fields
        misuse = sum(_extension.iser_cuda.take_misuse(ordinal) for ordinal in self._ordinals)
        if misuse:
            fields["code"] = _BAD_HANDLE
            fields["text"] = (
                f"IserError: {misuse} calls on these GPUs named a Domain that is not open or has "
                "another configuration, and gave NaN; attach the open Domain again "
                "(jax_iser.nnx.attach(model, domain)), or pass its handle as an argument of the "
                "program, not as a constant captured by it"
            )
        return fields

    def busy(self, reset: bool) -> tuple[np.ndarray, np.ndarray]:
        """Not on GPUs."""
        raise NotImplementedError("Domain.busy is measured on CPUs; on GPUs use jax.profiler")

    def timelines(self) -> list[tuple]:
        """Rows of `Timeline`, device by device; times are the GPUs' `%globaltimer`."""
        return [row for part in self._parts for row in part.read_timelines()]

    def helper(self, rank: int, bank: int, helper_idx: int) -> bytes:
        """Bytes of a helper slot."""
        part, local_idx = self._find(rank)
        return part.read_helper(local_idx, bank, helper_idx)

    def stall(self, rank: int, stage: int, seconds: float) -> None:
        """Delays the rank's next arrival; GPUs stage nothing, so that "staging" has none."""
        if stage == _STAGING:
            raise ValueError("on GPUs no bundle is staged; stall counts, dispatch or READY")
        part, local_idx = self._find(rank)
        part.stall(local_idx, stage, seconds)

    def _find(self, rank):
        device, local_idx = divmod(rank, self._config.ranks_per_device)
        index = device - self._first_device()
        if not 0 <= index < len(self._parts):
            raise ValueError(f"rank {rank} is not on a GPU of this process")
        return self._parts[index], local_idx

    def place(self, array: np.ndarray | jax.Array, sharding) -> jax.Array:
        """A plain placement: owners push copies, so that peers need not read weights."""
        return jax.device_put(array, sharding)


def _setup(config, is_multi_process):
    copy_sms = config.copy_sms or DEFAULT_COPY_SMS
    return _extension.iser_cuda.DomainSetup(options_of(config, is_multi_process), copy_sms)


@functools.cache
def workspace_bytes(config: DomainConfig, num_tokens: int) -> int:
    """Scratch that `fused_moe` of so many tokens a rank takes of XLA on each GPU."""
    if _extension.iser_cuda is None:
        raise ValueError(_NO_EXTENSION)
    return _setup(config, False).workspace_bytes(num_tokens)


def _check(config, is_multi_process):
    if _extension.iser_cuda is None:
        raise ValueError(_NO_EXTENSION)
    if is_multi_process and config.copy_rule != "owner_direct":
        raise ValueError(
            f"copy_rule={config.copy_rule!r} has ranks read each other's weights, which across "
            'processes GPUs cannot; use copy_rule="owner_direct", or one process for all GPUs'
        )


@functools.cache
def open_cublas() -> None:
    """Gives each GPU of this process a cuBLAS handle; programs that it lacks cannot run there."""
    if _extension.iser_cuda is None:
        raise ValueError(_NO_EXTENSION)
    for device in jax.local_devices():
        if device.platform == "gpu":
            _extension.iser_cuda.open_device(device.local_hardware_id, iser.HANDLE_MARK)
            _extension.iser_cuda.open_cublas(device.local_hardware_id, _cublas_path())


def _cublas_path() -> str:
    """The user's, else the one of jax's CUDA packages, else empty: the dynamic linker's."""
    if given := os.environ.get("ISER_CUBLAS_LIBRARY"):
        return given
    try:
        package = importlib.util.find_spec("nvidia")
    except ImportError:
        package = None
    for folder in (package.submodule_search_locations or ()) if package else ():
        for path in sorted(pathlib.Path(folder).glob("*/lib/libcublas.so.1[0-9]")):
            return str(path)
    return ""
