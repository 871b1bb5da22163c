"""JSON counts (SGLang, sglang-jax, vLLM load history) and Megatron's JSON-lines router traces."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jax_iser.replay.traces.counts import CountTrace
from jax_iser.replay.traces.errors import LIMITS, TraceError, check_size
from jax_iser.replay.traces.npz import checked_experts
from jax_iser.replay.traces.sglang import dense_counts
from jax_iser.replay.traces.tokens import layers_left_out


def parse_json(path, field: str, text: bytes | str):
    """A JSON value; a broken one is a `TraceError`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(path, field, f"broken JSON ({error})", "JSON") from None


def read_json(path, num_experts: int | None = None) -> CountTrace:
    """Counts under `logical_count`, `[L][E]` or `[steps][L][E]`; or vLLM's `load_history` of
    `logical_expert_load`, `[L][E]` each."""
    size = Path(path).stat().st_size
    if size > LIMITS.text_bytes:
        raise TraceError(path, "file", f"{size} bytes of JSON", f"at most {LIMITS.text_bytes}")
    content = parse_json(path, "file", Path(path).read_bytes())
    if not isinstance(content, dict):
        raise TraceError(path, "file", type(content).__name__, "an object")
    if "logical_count" in content:
        parts = [_numbers(path, "logical_count", content["logical_count"])]
    elif "load_history" in content:
        parts = _history(path, content["load_history"])
    else:
        keys = sorted(content)[:6]
        raise TraceError(path, "file", f"keys {keys}", "logical_count or load_history")
    whole = [np.rint(part) for part in parts]
    changed = any((a != b).any() for a, b in zip(parts, whole, strict=True))
    notes = ("loads rounded to whole routes",) if changed else ()
    counts = [part.astype(np.int64) for part in whole]
    trace = dense_counts(path, Path(path).stem, counts, notes)
    checked_experts(path, trace.num_experts, num_experts)
    return trace


def _history(path, history):
    if not isinstance(history, list) or not history:
        raise TraceError(path, "load_history", type(history).__name__, "a list of steps")
    parts = []
    for index, step in enumerate(history):
        field = f"load_history[{index}].logical_expert_load"
        if not isinstance(step, dict) or "logical_expert_load" not in step:
            raise TraceError(path, field, "nothing", "loads [layers][experts]")
        parts.append(_numbers(path, field, step["logical_expert_load"]))
    return parts


def _numbers(path, field, value) -> np.ndarray:
    """`[steps, L, E]` numbers, at least 0, from nested lists."""
    try:
        array = np.array(value, dtype=np.float64)
    except (ValueError, TypeError, OverflowError) as error:
        raise TraceError(path, field, f"no array ({error})", "numbers in equal lists") from None
    if array.ndim not in (2, 3) or not array.size:
        raise TraceError(path, field, f"shape {array.shape}", "[L][E] or [steps][L][E]")
    if not np.isfinite(array).all() or array.min() < 0 or array.max() >= 2**31:
        found = f"values from {array.min()} to {array.max()}"
        raise TraceError(path, field, found, f"values from 0 to {2**31 - 1}")
    return array.reshape(-1, *array.shape[-2:])


def read_megatron(paths: Sequence[Path], name: str, num_experts: int | None = None) -> CountTrace:
    """Megatron's `router_trace_rank*.jsonl`, a file a rank, read line by line into counts.

    A layer is named by its block (decoder or mtp), its number and, in an MTP block, its head. The
    n-th record of a layer in a step is the step's n-th call (micro-batch) of it: an iteration.
    """
    experts = checked_experts(paths[0], None, num_experts)
    counts: dict[tuple, np.ndarray] = {}  # by ((step, call), layer, rank)
    calls: Counter[tuple] = Counter()
    widths: set[int] = set()
    for path in paths:
        for number, record in _lines(path):
            step, layer, rank, ids = _record(path, number, record, experts)
            if len(ids):
                widths.add(ids.shape[1])
            call = calls[step, layer, rank]
            calls[step, layer, rank] += 1
            found = np.bincount(ids[ids >= 0], minlength=experts)
            counts[(step, call), layer, rank] = found.astype(np.int32)
    if not counts:
        raise TraceError(paths[0], "file", "no record", "lines with top_indices")
    if not any(found.any() for found in counts.values()):
        raise TraceError(paths[0], "top_indices", "no route at all", "ids of experts")
    steps, layers, ranks = (sorted({key[i] for key in counts}) for i in range(3))
    routed = {layer for (_, layer, _), found in counts.items() if found.any()}
    notes = layers_left_out(len(layers) - len(routed))
    layers = [layer for layer in layers if layer in routed]
    check_size(paths[0], "layers", len(layers), LIMITS.layers)
    zero = np.zeros(experts, np.int64)

    def read_steps():
        for step in steps:
            rows = [[counts.get((step, la, r), zero) for la in layers] for r in ranks]
            yield np.array(rows)

    top_k = widths.pop() if len(widths) == 1 else 0
    sizes = (len(steps), len(layers), experts)
    return CountTrace(paths[0], name, *sizes, read_steps, len(ranks), top_k, notes)


def _lines(path):
    with open(path, "rb") as stream:
        number = 0
        while line := stream.readline(LIMITS.line_bytes + 1):
            number += 1
            if len(line) > LIMITS.line_bytes:
                found = f"more than {LIMITS.line_bytes} bytes"
                raise TraceError(path, f"line {number}", found, "shorter lines")
            if line.strip():
                yield number, parse_json(path, f"line {number}", line)


def _record(path, number, record, experts):
    """Step, layer `(block, MTP head or -1, number)`, rank and ids `[tokens, topk]` of a line."""
    where = f"line {number}"
    if not isinstance(record, dict) or "top_indices" not in record:
        raise TraceError(path, where, type(record).__name__, "a record with top_indices")
    sizes = ("step", "layer", "rank", *(("mtp_idx",) if "mtp_idx" in record else ()))
    step, layer, rank, *head = (
        check_size(path, f"{where} {field}", record.get(field), 2**31, low=0) for field in sizes
    )
    if record.get("stage") != "pre_dispatch":
        raise TraceError(path, f"{where} stage", repr(record.get("stage"))[:80], "pre_dispatch")
    block = record.get("block")
    if not isinstance(block, str):
        raise TraceError(path, f"{where} block", repr(block)[:80], "a word, such as decoder")
    ids = _indices(path, where, record, experts)
    return step, (block, head[0] if head else -1, layer), rank, ids


def _indices(path, where, record, experts) -> np.ndarray:
    """`top_indices [num_tokens, topk]`; of a call without tokens it is an empty list."""
    field = f"{where} top_indices"
    try:
        ids = np.array(record["top_indices"])
    except (ValueError, TypeError, OverflowError) as error:
        raise TraceError(path, field, error, "lists of equal length") from None
    if not ids.size:
        ids = np.zeros((len(ids) if ids.ndim else 0, 0), np.int64)
    if ids.ndim != 2 or ids.dtype.kind not in "iu":
        found = f"{ids.dtype} of shape {ids.shape}"
        raise TraceError(path, field, found, "integers [tokens][topk]")
    told = [
        check_size(path, f"{where} {name}", record.get(name, size), 2**31, low=0)
        for name, size in zip(("num_tokens", "topk"), ids.shape, strict=True)
    ]
    if len(ids) != told[0] or (len(ids) and ids.shape[1] != told[1]):
        raise TraceError(path, field, f"shape {ids.shape}", f"{tuple(told)}")
    check_size(path, f"{where} topk", ids.shape[1], LIMITS.top_k, low=0)
    if ids.size and not -1 <= int(ids.min()) <= int(ids.max()) < experts:
        found = f"ids {ids.min()} to {ids.max()}"
        raise TraceError(path, field, found, f"ids from -1 to {experts - 1}")
    return ids.astype(np.int64)
