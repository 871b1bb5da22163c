"""SGLang's expert distribution recorder: `.pt` files in its stat, per_pass and per_token modes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from jax_iser.replay.traces.counts import CountTrace
from jax_iser.replay.traces.errors import LIMITS, TraceError, check_size
from jax_iser.replay.traces.npz import check_ids
from jax_iser.replay.traces.tokens import TokenTrace, layers_left_out
from jax_iser.replay.traces.torch_zip import LazyTensor, TorchArchive


def read_sglang(paths: Sequence[Path], name: str, num_experts: int | None = None):
    """A trace from one recorder file, or from all files of a recording.

    Args:
      paths: `.pt` files; of the per-rank modes one for each rank, of stat mode one for each dump.
      name: for tables.
      num_experts: checked against the files' where given.
    """
    archives = [TorchArchive(path) for path in paths]
    kinds = {_kind(archive) for archive in archives}
    if len(kinds) != 1:
        raise TraceError(paths[0].parent, "files", f"modes {sorted(kinds)}", "one recorder mode")
    trace = {"stat": _stat, "per_pass": _per_pass, "per_token": _per_token}[kinds.pop()](
        archives, name
    )
    if num_experts not in (None, trace.num_experts):
        raise TraceError(paths[0], "experts", trace.num_experts, f"--num-experts {num_experts}")
    return trace


# The field that tells a mode with records; per_token records hold both.
_RECORDS = {"per_token": "topk_ids_of_layer", "per_pass": "global_physical_count"}


def _kind(archive) -> str:
    content = archive.content
    if isinstance(content, dict) and isinstance(content.get("logical_count"), LazyTensor):
        return "stat"
    records = content.get("records") if isinstance(content, dict) else None
    if isinstance(records, list) and records and all(isinstance(r, dict) for r in records):
        for kind, field in _RECORDS.items():
            if all(field in record for record in records):
                return kind
    found = f"keys {sorted(map(str, content))[:6]}" if isinstance(content, dict) else "no dict"
    raise TraceError(archive.path, "content", found, "logical_count, or records of one mode")


def _tensor(archive, value, field: str, ndim: int) -> LazyTensor:
    """The tensor of a field, where it holds integers of that many dimensions."""
    if not isinstance(value, LazyTensor) or value.dtype.kind not in "iu":
        found = value.dtype if isinstance(value, LazyTensor) else type(value).__name__
        raise TraceError(archive.path, field, found, "a tensor of integers")
    if len(value.shape) != ndim:
        raise TraceError(archive.path, field, f"shape {value.shape}", f"{ndim} dimensions")
    return value


def _stat(archives, name):
    tensors = []
    for archive in archives:
        value = archive.content["logical_count"]
        ndim = 3 if len(value.shape) == 3 else 2
        tensors.append((archive, _tensor(archive, value, "logical_count", ndim)))
    return dense_counts(
        archives[0].path,
        name,
        [archive.read(t, "logical_count").reshape(-1, *t.shape[-2:]) for archive, t in tensors],
    )


def dense_counts(path, name: str, parts: list[np.ndarray], notes: tuple[str, ...] = ()):
    """A trace of `[steps, L, E]` counts, less the layers and steps without any route."""
    shapes = {part.shape[1:] for part in parts}
    if len(shapes) != 1:
        raise TraceError(path, "logical_count", f"shapes {sorted(shapes)}", "the same in all files")
    layers, experts = shapes.pop()
    check_size(path, "layers", layers, LIMITS.layers)
    check_size(path, "experts", experts, LIMITS.experts)
    counts = np.concatenate(parts)
    steps, used = counts.any(axis=(1, 2)), counts.any(axis=(0, 2))
    if not steps.any():
        raise TraceError(path, "logical_count", "no route at all", "counts above 0")
    if not steps.all():
        notes += (f"{int((~steps).sum())} steps without a route left out (unused buffer)",)
    notes += layers_left_out(int((~used).sum()))
    counts = counts[steps][:, used]
    num_steps, layers, experts = counts.shape
    source = lambda: (step[None] for step in counts)  # noqa: E731
    return CountTrace(path, name, num_steps, layers, experts, source, notes=notes)


def _records(archives):
    """Records of all files by pass, then by rank: `{pass: {rank: (archive, record)}}`."""
    passes: dict[int, dict[int, tuple]] = {}
    for archive in archives:
        for record in archive.content["records"]:
            key = check_size(
                archive.path, "forward_pass_id", record.get("forward_pass_id"), 2**40, low=0
            )
            rank = check_size(archive.path, "rank", record.get("rank"), LIMITS.ranks - 1, low=0)
            if rank in passes.setdefault(key, {}):
                found = f"pass {key} of rank {rank} twice"
                raise TraceError(archive.path, "records", found, "one record a pass and rank")
            passes[key][rank] = (archive, record)
    return dict(sorted(passes.items()))


def _logical_maps(archives):
    """Each file's `last_physical_to_logical_map [L, physical]`, checked, and the number of experts.

    Returns:
      `{path: map}`, all of one shape, and `E`.
    """
    field, tables = "last_physical_to_logical_map", {}
    for archive in archives:
        tensor = _tensor(archive, archive.content.get(field), field, 2)
        table = archive.read(tensor, field)
        if not table.size or table.min() < 0:
            raise TraceError(archive.path, field, "no or negative entries", "expert ids")
        tables[archive.path] = table
    first = tables[archives[0].path]
    experts = check_size(archives[0].path, "experts", int(first.max()) + 1, LIMITS.experts)
    check_size(archives[0].path, "layers", first.shape[0], LIMITS.layers)
    for path, table in tables.items():
        if table.shape != first.shape or int(table.max()) + 1 != experts:
            found = f"shape {table.shape} with {int(table.max()) + 1} experts"
            expected = f"shape {first.shape} with {experts}, as in {archives[0].path.name}"
            raise TraceError(path, field, found, expected)
    return tables, experts


_RECEIVED = (
    "each rank recorded what it received (DeepEP's low-latency mode), not what it sent: send and "
    "recv columns are those of evenly spread sources"
)


def _per_pass(archives, name):
    tables, experts = _logical_maps(archives)
    passes = _records(archives)
    ranks = sorted({rank for records in passes.values() for rank in records})
    num_layers, physical = tables[archives[0].path].shape

    def read(archive, record):
        field = "global_physical_count"
        tensor = _tensor(archive, record[field], field, 2)
        if tensor.shape != (num_layers, physical):
            expected = f"shape {(num_layers, physical)}"
            raise TraceError(archive.path, field, tensor.shape, expected)
        return archive.read(tensor, field)

    used = np.zeros(num_layers, bool)
    experts_of = {rank: np.zeros(physical, bool) for rank in ranks}
    for records in passes.values():
        for rank, (archive, record) in records.items():
            count = read(archive, record)
            used |= count.any(axis=1)
            experts_of[rank] |= count.any(axis=0)
    local = _hold_only_their_own(experts_of)
    if not used.any():
        raise TraceError(archives[0].path, "records", "no route at all", "counts above 0")
    layers = np.arange(num_layers)[:, None]

    def steps() -> Iterator[np.ndarray]:
        for records in passes.values():
            step = np.zeros((len(ranks), num_layers, experts), np.int64)
            for rank, (archive, record) in records.items():
                table = tables[archive.path]
                np.add.at(step[ranks.index(rank)], (layers, table), read(archive, record))
            yield step.sum(axis=0, keepdims=True)[:, used] if local else step[:, used]

    notes = (
        "physical counts mapped to experts by the last map of the recording",
        *layers_left_out(int((~used).sum())),
        *((_RECEIVED,) if local else ()),
    )
    sizes = (len(passes), int(used.sum()), experts)
    sources = 1 if local else len(ranks)
    return CountTrace(archives[0].path, name, *sizes, steps, sources, notes=notes)


def _hold_only_their_own(experts_of: dict[int, np.ndarray]) -> bool:
    """Whether several ranks' counts, `[physical] bool` each, lie in the experts of that rank alone.

    The ranks recorded may be some of those that there were.
    """
    physical = len(next(iter(experts_of.values())))
    for num_ranks in range(max(experts_of) + 1, physical + 1):
        owner = np.arange(physical) // (physical // num_ranks)
        if physical % num_ranks == 0 and all(
            (owner[used] == rank).all() for rank, used in experts_of.items()
        ):
            return len(experts_of) > 1
    return False


def _per_token(archives, name):
    tables, experts = _logical_maps(archives)
    passes = _records(archives)
    entries = [(rank, *entry) for records in passes.values() for rank, entry in records.items()]
    num_layers, physical = tables[archives[0].path].shape
    field, lengths, widths = "topk_ids_of_layer", [], set()
    for _, archive, record in entries:
        tensor = _tensor(archive, record[field], field, 3)
        if tensor.shape[0] != num_layers:
            raise TraceError(archive.path, field, tensor.shape, f"{num_layers} layers first")
        lengths.append(tensor.shape[1])
        widths.add(tensor.shape[2])
    path = archives[0].path
    if len(widths) != 1:
        raise TraceError(path, field, f"top_k {sorted(widths)}", "one top_k")
    top_k = check_size(path, "top_k", widths.pop(), LIMITS.top_k)
    total = check_size(path, "tokens", sum(lengths), LIMITS.tokens)
    layer = np.arange(num_layers)[None, :, None]

    def blocks(rows: int) -> Iterator[np.ndarray]:
        for _, archive, record in entries:
            ids = archive.read(record[field], field).transpose(1, 0, 2)
            check_ids(archive.path, field, ids, physical)
            table = tables[archive.path]
            logical = np.where(ids < 0, -1, table[layer, np.maximum(ids, 0)])
            for start in range(0, len(logical), rows):
                yield logical[start : start + rows]

    source = np.repeat([rank for rank, _, _ in entries], lengths)
    notes = ("each forward pass of a rank is one request",)
    sizes = (total, num_layers, top_k, experts)
    return TokenTrace(path, name, *sizes, blocks, np.array(lengths), source, notes)
