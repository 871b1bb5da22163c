"""Prefill of a language model over expert-parallel ranks, measured with and without balancing.

The engine of `jax-iser prefill`: `measure` runs every chunk through each arm, `summarize` makes the
figures of it.

Arms, all through the same compiled layer: `off` (`balance="none"`), `on` (`balance="haloq"`) and
`fb`, forced balanced routing: what a perfectly balanced layer would take, with outputs that mean
nothing. They take turns chunk by chunk, so that drift of the machine meets them alike.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from jax_iser.domain import DomainHandle

ARMS = ("off", "on", "fb")
_FIELDS = ("load_before", "load", "broadcasts", "copies", "copied_bytes")


@dataclasses.dataclass
class ArmRecord:
    """What one arm did; arrays lead with the chunks.

    Attributes:
      load_before, load: `[chunks, layers, P]`, routes by computing rank without and with the plan.
      broadcasts, copies: `[chunks, layers]`; copies are bundles that crossed to another rank.
      copied_bytes: `[chunks, layers]`.
      busy: `[chunks, layers, P]` f64, a rank's CPU seconds in expert tiles; on GPUs `[chunks,
        layers, devices]`, from the call's start to its output. The least of the repeats: what
        disturbs only ever adds. None without a Domain.
      seconds: `[chunks, repeats]` f64, wall time.
      logits_sha256: per chunk, of the raw bytes of all ranks' logits in rank order.
      topk_ids: `[chunks, tokens, layers, top_k]` i16, tokens rank by rank.
      bits: `[chunks]`, bits of all targets of the chunk that are text.
    """

    load_before: Any = dataclasses.field(default_factory=list)
    load: Any = dataclasses.field(default_factory=list)
    broadcasts: Any = dataclasses.field(default_factory=list)
    copies: Any = dataclasses.field(default_factory=list)
    copied_bytes: Any = dataclasses.field(default_factory=list)
    busy: Any = dataclasses.field(default_factory=list)
    seconds: Any = dataclasses.field(default_factory=list)
    logits_sha256: list[str] = dataclasses.field(default_factory=list)
    topk_ids: Any = dataclasses.field(default_factory=list)
    bits: Any = dataclasses.field(default_factory=list)

    def to_arrays(self) -> ArmRecord:
        """The same with arrays for lists."""
        stacked = {
            field.name: np.array(getattr(self, field.name))
            for field in dataclasses.fields(self)
            if field.name not in ("busy", "logits_sha256")
        }
        busy = None if self.busy[0] is None else np.array(self.busy)
        return ArmRecord(**stacked, busy=busy, logits_sha256=self.logits_sha256)


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What `measure` saw.

    Attributes:
      arms: by name, those that ran.
      bitwise_equal: whether every `on` run gave the bytes of the `off` run of its chunk; None
        unless both ran.
      repeatable: whether every repeat of an arm gave the bytes of its first run.
      num_text_bytes: targets that count for bits a byte.
      tokens_per_chunk: tokens of all ranks.
      seconds_of: what `ArmRecord.busy` is of: "tiles" on CPUs, "call" on GPUs, None without it.
    """

    arms: dict[str, ArmRecord]
    bitwise_equal: bool | None
    repeatable: bool
    num_text_bytes: int
    tokens_per_chunk: int
    seconds_of: str | None


def compile_arms(model: nnx.Module, arms: Sequence[str]) -> dict[str, Callable]:
    """One jitted function an arm: `(state, tokens, handle) -> (logits, layers)`.

    The arms differ in static attributes of the MoE modules only; they share the state's arrays.
    """
    from jax_iser.models import prefill
    from jax_iser.nnx import MoE

    def compiled(arm):
        for _, module in nnx.iter_graph(model):
            if isinstance(module, MoE):
                module.balance = "haloq" if arm == "on" else "none"
        graph = nnx.graphdef(model)
        routing = "balanced" if arm == "fb" else None

        def run(state, tokens, handle):
            merged = nnx.merge(graph, state)
            return prefill(merged, tokens, domain=handle, forced_routing=routing)

        return jax.jit(run)

    return {arm: compiled(arm) for arm in arms}


def measure(
    model: nnx.Module,
    domain,
    inputs: np.ndarray,
    targets: np.ndarray,
    *,
    arms: Sequence[str] = ARMS,
    repeats: int = 1,
    separator: int = 0,
    progress: Callable[[str, str], None] = lambda arm, stage: None,
) -> Measurement:
    """Runs every chunk through every arm.

    Args:
      model: a `jax_iser.models.MoELM` on a mesh.
      domain: a `Domain` that fits it, or for `method="portable"` a bare `DomainHandle`.
      inputs, targets: `[chunks, sequences, length]` i32; a chunk's sequences come rank by rank,
        as many for each.
      arms: names out of `ARMS`.
      repeats: runs of each chunk and arm.
      separator: target that is no text: it does not count for bits a byte.
      progress: called with the arm and "compile" or "run", after each.

    Returns:
      A `Measurement`; in a program of several processes the same on all of them.

    Raises:
      ValueError: an unknown arm, no chunk, or shapes that do not fit the model.
      IserError: the Domain failed.
    """
    unknown = [arm for arm in arms if arm not in ARMS]
    if unknown or not arms:
        raise ValueError(f"arms {unknown or 'none'}: name some of {', '.join(ARMS)}")
    if not len(inputs) or repeats < 1:
        raise ValueError(f"{len(inputs)} chunks and {repeats} repeats: nothing to run")
    runner = _Runner(model, domain, arms)
    for arm in arms:  # compiles, and warms memory up
        runner.run(arm, inputs[0])
        progress(arm, "compile")
    records = {arm: ArmRecord() for arm in arms}
    is_equal, is_repeatable = True, True
    for chunk, (tokens, wanted) in enumerate(zip(inputs, targets, strict=True)):
        seen = _take_turns(runner, chunk, tokens, arms, repeats, progress)
        for arm, runs in seen.items():
            is_repeatable &= _all_equal(runs, runs[0])
            _append(records[arm], runs, wanted, separator)
        if "off" in seen and "on" in seen:
            is_equal &= _all_equal(seen["on"], seen["off"][0])
    if hasattr(domain, "check"):
        domain.check()
    return Measurement(
        arms={arm: record.to_arrays() for arm, record in records.items()},
        bitwise_equal=bool(is_equal) if {"off", "on"} <= set(arms) else None,
        repeatable=bool(is_repeatable),
        num_text_bytes=int((targets != separator).sum()),
        tokens_per_chunk=int(inputs[0].size),
        seconds_of=runner.clock and runner.clock.seconds_of,
    )


@dataclasses.dataclass(frozen=True)
class _Run:
    """One chunk through one arm, on the host."""

    logits: np.ndarray
    layers: list[dict[str, np.ndarray]]
    busy: np.ndarray | None
    seconds: float


class _TileClock:
    """CPU time of each rank in expert tiles."""

    seconds_of = "tiles"

    def __init__(self, domain):
        self._domain = domain

    def begin(self) -> None:
        self._domain.busy(reset=True)

    def read(self) -> np.ndarray:
        """`[layers, ranks of this process]` since `begin`."""
        return self._domain.busy()[0]


class _CallClock:
    """Time of each GPU from a layer call's start to its output, by the GPU's own clock."""

    seconds_of = "call"

    def __init__(self, domain):
        self._domain = domain

    def begin(self) -> None:
        self._seen = {(t.first_rank, t.generation) for t in self._domain.timelines()}

    def read(self) -> np.ndarray:
        """`[layers, devices of this process]` since `begin`."""
        rows = [
            t for t in self._domain.timelines() if (t.first_rank, t.generation) not in self._seen
        ]
        device_of = {rank: i for i, rank in enumerate(sorted({t.first_rank for t in rows}))}
        seconds = np.zeros((self._domain.config.num_layers, len(device_of)))
        for t in rows:
            seconds[t.layer, device_of[t.first_rank]] += (t.finished - t.started) * 1e-9
        return seconds


def _clock_of(domain):
    """None for a bare handle."""
    if not hasattr(domain, "timelines"):
        return None
    return (_TileClock if domain.config.platform == "cpu" else _CallClock)(domain)


class _Runner:
    """Compiled arms with what they need of the mesh."""

    def __init__(self, model, domain, arms):
        self.domain, self.handle = domain, getattr(domain, "handle", domain)
        self.clock = _clock_of(domain)
        self.functions = compile_arms(model, arms)
        self.state = nnx.state(model)
        self.sharding = NamedSharding(model.mesh, PartitionSpec(model.axis))

    def run(self, arm: str, tokens: np.ndarray) -> _Run:
        placed = jax.make_array_from_callback(
            tokens.shape, self.sharding, lambda index: tokens[index]
        )
        if self.clock is not None:
            self.clock.begin()
        began = time.perf_counter()
        logits, layers = self.functions[arm](self.state, placed, self.handle)
        jax.block_until_ready((logits, layers))
        seconds = time.perf_counter() - began
        busy = None if self.clock is None else _gather_ranks(self.clock.read())
        kept = [
            {name: _on_host(layer[name]) for name in (*_FIELDS, "topk_ids")} for layer in layers
        ]
        return _Run(_on_host(logits), kept, busy, seconds)


def _take_turns(runner, chunk, tokens, arms, repeats, progress) -> dict[str, list[_Run]]:
    """All runs of one chunk, by arm; another arm begins each round."""
    seen: dict[str, list[_Run]] = {arm: [] for arm in arms}
    for repeat in range(repeats):
        turn = (chunk + repeat) % len(arms)
        for arm in (*arms[turn:], *arms[:turn]):
            seen[arm].append(runner.run(arm, tokens))
            progress(arm, "run")
    return seen


def _all_equal(runs: list[_Run], to: _Run) -> bool:
    return all(_same_bytes(run.logits, to.logits) for run in runs)


def _on_host(array: jax.Array) -> np.ndarray:
    """All of an array, also where other processes hold parts of it."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def _gather_ranks(busy: np.ndarray) -> np.ndarray:
    """`[layers, ranks of this process]` to `[layers, P]`, or devices in place of ranks."""
    if jax.process_count() == 1:
        return busy
    # As bytes, since jax would halve the precision.
    pieces = multihost_utils.process_allgather(np.ascontiguousarray(busy).view(np.uint8))
    return np.concatenate([np.ascontiguousarray(piece).view(np.float64) for piece in pieces], 1)


def _same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal in every bit: unlike `==` on floats, NaN equals itself and -0 differs from 0."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def _append(record: ArmRecord, runs: list[_Run], targets, separator) -> None:
    first = runs[0]
    for name in _FIELDS:
        getattr(record, name).append([layer[name] for layer in first.layers])
    ids = np.stack([layer["topk_ids"] for layer in first.layers], axis=1)
    record.topk_ids.append(ids.astype(np.int16))
    busy = [run.busy for run in runs if run.busy is not None]
    record.busy.append(np.min(busy, axis=0) if busy else None)
    record.seconds.append([run.seconds for run in runs])
    record.logits_sha256.append(hashlib.sha256(first.logits.tobytes()).hexdigest())
    record.bits.append(text_bits(first.logits, targets, separator))


def text_bits(logits: np.ndarray, targets: np.ndarray, separator: int) -> float:
    """Bits of all `targets [sequences, length]` but separators under `logits [..., vocab]`."""
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    log_sum = np.log(np.exp(wide).sum(-1))
    chosen = np.take_along_axis(wide, targets[..., None], -1)[..., 0]
    return float((log_sum - chosen)[targets != separator].sum() / np.log(2))


def imbalance(load: np.ndarray) -> np.ndarray:
    """R, max over mean of `[..., P]` loads; 1 where there is no load."""
    mean = load.mean(-1)
    return np.where(mean > 0, load.max(-1) / np.where(mean > 0, mean, 1), 1.0)


def reference_handle(mesh, axis: str, config) -> DomainHandle:
    """A handle that carries sizes and knobs to `method="portable"`, with no Domain behind it."""
    shape = (mesh.shape[axis], 4)
    sharding = NamedSharding(mesh, PartitionSpec(axis))
    words = jax.make_array_from_callback(
        shape, sharding, lambda index: np.zeros(shape, np.uint32)[index]
    )
    return DomainHandle(words, config)
