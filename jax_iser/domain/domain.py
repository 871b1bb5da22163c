"""The Domain: symmetric memory and membership of an expert-parallel group."""

from __future__ import annotations

import atexit
import dataclasses
import difflib
import math
import threading
import warnings
import weakref
from typing import Any, Never

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jax_iser import _fork
from jax_iser._extension import iser
from jax_iser.domain import rendezvous
from jax_iser.domain.config import DomainConfig, check_integer
from jax_iser.domain.cpu import CpuRuntime
from jax_iser.domain.handle import DomainHandle
from jax_iser.domain.meeting import Meeting
from jax_iser.domain.options import shape_of
from jax_iser.errors import IserError
from jax_iser.experts.activation import SILU, Activation
from jax_iser.experts.weights import ExpertWeights

_PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda"}  # of jax's devices
_open_domains: weakref.WeakSet[Domain] = weakref.WeakSet()
_kept_domains: set[Domain] = set()  # attached to a model: they stay alive until they are closed


class Domain:
    """Symmetric memory, threads and state of the ranks along one mesh axis.

    Made once, eagerly, outside jit. Use it as a context manager: leaving it is a barrier, then
    releases everything, and raises `IserError` if the Domain has failed.

    Args:
      mesh: a `jax.sharding.Mesh`; its devices are CPUs, or GPUs, of one host.
      axis: the expert-parallel axis; other axes of `mesh` must have size 1: one program drives one
        expert-parallel group, and its modules are made with this same mesh.
      ranks_per_device: ranks on each device; `P = axis size * ranks_per_device`.

    All other arguments are fields of `DomainConfig`, which describes them. `num_ranks` and
    `platform` follow from the mesh.

    Attributes:
      config: the validated `DomainConfig`.
      handle: the `DomainHandle` that programs take. Two Domains of equal sizes share compiled
        programs.

    Keep a reference to a Domain for as long as its handle is used: one that nobody keeps is
    released. A Domain that `jax_iser.nnx.attach` was given stays alive until it is closed.

    Raises:
      ValueError, TypeError: sizes that do not fit, naming both values.
      IserError: another process of the mesh failed to make the Domain, is gone, or did not come.
      RuntimeError: in a process that was forked after JAX had been started.

    Example:
      >>> mesh = jax.make_mesh((1,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> with Domain(mesh, "ep", ranks_per_device=4, num_experts=8, top_k=2, hidden_size=16,
      ...             intermediate_size=32, max_tokens_per_rank=64) as domain:
      ...     domain.config.num_ranks
      4
    """

    def __init__(
        self,
        mesh: jax.sharding.Mesh,
        axis: str = "ep",
        *,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        max_tokens_per_rank: int,
        ranks_per_device: int = 1,
        num_helper_slots: int = 4,
        dtype: Any = "float32",
        weight_dtype: Any = None,
        weight_format: str | None = None,
        token_format: str | None = None,
        activation: str | Activation = SILU,
        expert_biases: bool = False,
        num_layers: int = 1,
        bank: str = "shared",
        min_group_size: int = 4,
        min_routes: int = 0,
        gain_threshold: int = 0,
        resident: bool = False,
        copy_rule: str = "owner_direct",
        max_routes_per_rank: int | None = None,
        timeout_s: float = 120.0,
        startup_timeout_s: float | None = None,
        poison: bool = False,
        copy_sms: int | None = None,
        **unknown: Never,
    ):
        _fork.refuse()
        _check_mesh(mesh, axis)
        self.mesh, self.axis = mesh, axis
        self._devices = list(mesh.devices.flat)
        self._lock, self._is_open = threading.Lock(), True
        # Whatever goes wrong from here on, the other processes are told.
        with Meeting(self._devices, ranks_per_device) as meeting:
            _check_names(unknown)
            check_integer("ranks_per_device", ranks_per_device, least=1)
            self.config = DomainConfig(
                num_ranks=mesh.shape[axis] * ranks_per_device,
                num_experts=num_experts,
                top_k=top_k,
                hidden_size=hidden_size,
                intermediate_size=intermediate_size,
                max_tokens_per_rank=max_tokens_per_rank,
                ranks_per_device=ranks_per_device,
                num_helper_slots=num_helper_slots,
                dtype=dtype,
                weight_dtype=weight_dtype,
                weight_format=weight_format,
                token_format=token_format,
                activation=Activation.of(activation),
                expert_biases=expert_biases,
                num_layers=num_layers,
                bank=bank,
                min_group_size=min_group_size,
                min_routes=min_routes,
                gain_threshold=gain_threshold,
                resident=resident,
                copy_rule=copy_rule,
                max_routes_per_rank=max_routes_per_rank,
                timeout_s=timeout_s,
                startup_timeout_s=startup_timeout_s,
                poison=poison,
                copy_sms=copy_sms,
                platform=_platform_of(mesh),
            )
            self._make(meeting)
        _open_domains.add(self)

    def _make(self, meeting):
        self._runtime = _make_runtime(self.config, self._devices, meeting)
        self._members = self._runtime.members
        self._dropped = weakref.finalize(self, _release_dropped, self._runtime)
        self._dropped.atexit = False  # _close_all is there for the open ones
        try:
            self.handle = DomainHandle(self._place_words(), self.config)
            self._runtime.publish()
            self._members.wait_made(self.config.startup_limit_s(not meeting.is_alone))
        except BaseException as error:
            meeting.tell(error)  # before the sockets close, so that peers learn why
            self._release(0.0)
            raise

    def _place_words(self):
        ranks = self.config.ranks_per_device
        rows = [
            np.array([[self._runtime.id, i * ranks, iser.HANDLE_MARK, 0]], np.uint32)
            for i in range(len(self._devices))
        ]
        sharding = NamedSharding(self.mesh, PartitionSpec(self.axis))
        local = [
            jax.device_put(row, device)
            for row, device in zip(rows, self._devices, strict=True)
            if device.process_index == jax.process_index()
        ]
        return jax.make_array_from_single_device_arrays((len(rows), 4), sharding, local)

    @property
    def is_open(self) -> bool:
        """Whether the Domain can be used; a failed one is still open."""
        return self._is_open

    def __enter__(self) -> Domain:
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self.close(check=kind is None)

    def close(self, *, check: bool = True, wait_s: float = 10.0) -> None:
        """Waits for pending results and for the other processes, then releases everything.

        Args:
          check: raise `IserError` if the Domain has failed.
          wait_s: how long calls in flight may take before they are failed.

        A forked child's copy of a Domain is the parent's: closing it does nothing.
        """
        if _fork.is_child():  # what is shared is the parent's, and the lock may be held for ever
            return
        with self._lock:
            if not self._is_open:
                return
            _wait_for_results(self._devices)
            failure = self._failure()
            if failure is None:
                # Idle first: a process that leaves looks dead to calls that still wait.
                self._runtime.wait_idle(wait_s)
                failure = self._failure() or self._part()
            self._release(wait_s if failure is None else 0.0)
        if check and failure is not None:
            raise failure

    def _release(self, wait_s):
        self._is_open = False
        self._dropped.detach()
        _open_domains.discard(self)
        _kept_domains.discard(self)
        self._runtime.close(wait_s)

    def _part(self) -> IserError | None:
        """Leaves together with the other processes; what went wrong meanwhile."""
        self._runtime.leave()
        failure = self._members.part(self.config.timeout_s)
        return self._failure() or failure  # a peer's call that needed this process says more

    def _failure(self) -> IserError | None:
        fields = self._runtime.describe_error()
        text = fields.pop("text")
        return IserError(text, **fields) if fields["code"] else None

    def check(self) -> None:
        """Raises `IserError` if the Domain has failed, or its guard words were overwritten.

        Block on results first: a call still in flight may yet fail.
        """
        self._require_open()
        failure = self._failure()
        if failure is not None:
            raise failure

    def _require_open(self):
        _fork.refuse()
        if not self._is_open:
            raise ValueError("this Domain is closed; make a new one")

    def describe(self) -> dict:
        """Sizes: `config`, `bytes_per_rank` by section, `bytes_total` and `processes`."""
        return describe(self.config, len(self._members.specs))

    def busy(self, *, reset: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """CPU time in expert tiles, and rows computed, since made or last reset.

        Returns:
          `(seconds, rows)`, both `[num_layers, ranks of this process]`, f64 and i64. Seconds are
          the thread's CPU clock, so ranks that share cores do not disturb each other's.
        """
        self._require_open()
        return self._runtime.busy(reset)

    def timelines(self) -> list[Timeline]:
        """Moments of the last calls (4,096 at most), oldest first, by device of this process."""
        self._require_open()
        return [Timeline(*row) for row in self._runtime.timelines()]

    def place(self, weights):
        """Puts expert weights where every process of the Domain can read them in place.

        Within one process this is a plain placement on the mesh. Across processes the arrays live
        in shared memory, which they keep alive past the Domain; without it owners copy a bundle
        aside before other processes pull it.

        Args:
          weights: a pytree of arrays with the experts of all ranks, `[E, a, b]`, FP8 planes
            `[E, bytes]`, or either stacked `[L, E, ...]`: whole on every process and equal there,
            or `jax.Array`s that are already sharded over the experts.

        Returns:
          The same tree of `jax.Array`s, sharded over the experts.

        Raises:
          ValueError: an array whose expert axis is not `num_experts` long, or that processes share
            in another way.
          IserError: another process is gone, closes the Domain, or does not call this too.
        """
        self._require_open()
        is_experts = lambda node: isinstance(node, ExpertWeights)  # noqa: E731
        return jax.tree.map(self._place_node, weights, is_leaf=is_experts)

    def _place_node(self, node):
        gate, *_ = self.config.bundle.planes
        if not isinstance(node, ExpertWeights):
            return self._place_array(node, gate.num_dims)
        planes = zip(node.planes, self.config.bundle.planes, strict=False)
        return ExpertWeights(*(self._place_array(a, plane.num_dims) for a, plane in planes))

    def _place_array(self, array, num_dims):
        array = array if isinstance(array, jax.Array) else np.asarray(array)
        axis = array.ndim - num_dims
        if axis not in (0, 1) or array.shape[axis] != self.config.num_experts:
            raise ValueError(
                f"weights of shape {array.shape} do not have num_experts="
                f"{self.config.num_experts} on axis {axis}; pass [E, ...] or [L, E, ...]"
            )
        sharding = NamedSharding(self.mesh, PartitionSpec(*[None] * axis, self.axis))
        if isinstance(array, jax.Array) and array.sharding.is_equivalent_to(sharding, array.ndim):
            sharding = array.sharding  # as it is spelt: programs are compiled for that
        elif rendezvous.is_spread(array):
            raise ValueError(
                f"weights of several processes are sharded as {array.sharding}, expected "
                f"{sharding}: spread them over the experts (jax.device_put) before they are placed"
            )
        return self._runtime.place(array, sharding)

    def helper(self, rank: int, layer: int, helper_idx: int) -> bytes:
        """The bytes of a helper slot: gate, up and down planes of the replica it holds."""
        self._require_open()
        config = self.config
        for name, value, size in (
            ("rank", rank, config.num_ranks),
            ("layer", layer, config.num_layers),
            ("helper_idx", helper_idx, config.num_helper_slots),
        ):
            if not 0 <= value < size:
                raise ValueError(f"{name}={value}: no such helper slot; {name} is in 0..{size - 1}")
        return self._runtime.helper(rank, layer % self.config.num_banks, helper_idx)

    def stall(self, rank: int, stage: str, seconds: float) -> None:
        """Delays the rank's next arrival at a stage: for tests of what a late rank does."""
        self._require_open()
        if stage not in STAGES:
            raise ValueError(f"stage={stage!r} is not one of {', '.join(STAGES)}")
        if not (math.isfinite(seconds) and 0 <= seconds <= 3600):
            raise ValueError(f"seconds={seconds} is outside 0..3600")
        if not 0 <= rank < self.config.num_ranks:
            raise ValueError(
                f"rank={rank} is not one of the {self.config.num_ranks} ranks of the Domain"
            )
        self._runtime.stall(rank, STAGES.index(stage), seconds)


STAGES = ("counts", "staging", "dispatch", "READY")


@dataclasses.dataclass(frozen=True)
class Timeline:
    """One call on one device; times are `time.monotonic_ns()`, on GPUs the device's clock in ns.

    `started`: start was called. `planned`: its plan was known. `copy_begin`, `copy_end`: the
    device's copies, up to its READY. `fused_called`: fused_moe was called, so the shared expert had
    ended. `ready_seen`: every rank was READY. `finished`: the output was complete.
    """

    first_rank: int
    generation: int
    layer: int
    started: int
    planned: int
    copy_begin: int
    copy_end: int
    fused_called: int
    ready_seen: int
    finished: int


def describe(config: DomainConfig, num_processes: int = 1) -> dict:
    """Bytes a Domain of `config` takes, before it is made."""
    sections = dict(shape_of(config, num_processes > 1).section_sizes())
    total = sections.pop("total") * config.num_ranks
    return {
        "config": dataclasses.asdict(config),
        "bytes_per_rank": sections,
        "bytes_total": total,
        "processes": num_processes,
    }


def _check_mesh(mesh, axis):
    if not isinstance(mesh, jax.sharding.Mesh):
        raise TypeError(f"mesh is a {type(mesh).__name__}, expected a jax.sharding.Mesh")
    if axis not in mesh.shape:
        raise ValueError(
            f'axis "{axis}" is not among the mesh axes {tuple(mesh.axis_names)}; pass the name of '
            "the expert-parallel one: Domain(mesh, axis, ...)"
        )
    others = {name: size for name, size in mesh.shape.items() if name != axis and size > 1}
    if others:
        raise ValueError(
            f'a Domain spans axis "{axis}" alone, but the mesh also has {others}; one program '
            "drives one expert-parallel group: make the Domain, and the modules that use it, on a "
            "mesh of that group's devices alone"
        )
    _platform_of(mesh)


def _check_names(unknown):
    """TypeError, with the remedy, for names that are no options."""
    of_mesh = {"num_ranks": "axis size * ranks_per_device", "platform": "that of the devices"}
    fields = (field.name for field in dataclasses.fields(DomainConfig))
    options = [name for name in fields if name not in of_mesh]
    for name in unknown:
        if name in of_mesh:
            raise TypeError(f"{name} follows from the mesh ({of_mesh[name]}); leave it out")
        close = difflib.get_close_matches(name, options, 1)
        remedy = f"did you mean {close[0]}?" if close else "options: " + ", ".join(options)
        raise TypeError(f"a Domain has no option {name}; {remedy}")


def _platform_of(mesh) -> str:
    platforms = {device.platform for device in mesh.devices.flat}
    if not platforms <= set(_PLATFORMS) or len(platforms) > 1:
        raise ValueError(
            f"the mesh has devices of platform {', '.join(sorted(platforms))}; a Domain takes CPUs "
            'or GPUs, use method="portable" elsewhere'
        )
    return _PLATFORMS[platforms.pop()]


def _make_runtime(config, devices, meeting):
    if config.platform == "cpu":
        return CpuRuntime(config, devices, meeting)
    from jax_iser.domain.cuda.runtime import CudaRuntime

    return CudaRuntime(config, devices, meeting)


def keep_open(domain: Domain | DomainHandle) -> None:
    """Keeps an open Domain of this process alive until it is closed, whoever drops it."""
    words = domain.words if isinstance(domain, DomainHandle) else domain.handle.words
    _kept_domains.update(each for each in _open_domains if each.handle.words is words)


def _refuse_as_operand(domain):
    raise TypeError(
        "a jax_iser.Domain is passed where arrays belong; pass domain.handle to a program, and "
        "give a Flax module its Domain by jax_iser.nnx.attach(model, domain)"
    )


# Otherwise a jitted function that is given a Domain fails in jax's words, without the remedy.
jax.tree_util.register_pytree_node(Domain, _refuse_as_operand, lambda _, children: children)


def _wait_for_results(devices):
    """Waits for what programs there have yet to deliver: their next layer may need the Domain.

    Each wait ends: the Domain's own have limits. Errors belong to whoever reads the results.
    """
    here = set(devices)
    for array in jax.live_arrays(devices[0].platform):
        try:
            if here & array.devices():
                array.block_until_ready()
        except RuntimeError:  # failed, deleted or donated meanwhile
            continue


def _release_dropped(runtime):
    """Ends a Domain that nobody closed. On a thread of its own: garbage is found on any thread, one
    of the Domain's included, which could not wait for itself."""
    if _fork.is_child():
        return
    warnings.warn(
        "a jax_iser.Domain was dropped without close(); use it as a context manager",
        ResourceWarning,
        stacklevel=2,
    )

    # The interpreter waits for it: a thread that it has left behind may not come back to Python.
    threading.Thread(target=runtime.close, args=(1.0,), name="jax_iser-release").start()


@atexit.register
def _close_all():
    if _fork.is_child():
        return
    for domain in list(_open_domains):
        domain.close(check=False, wait_s=1.0)
