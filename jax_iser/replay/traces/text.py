"""JSON counts (SGLang, sglang-jax, vLLM load history) and Megatron's JSON-lines router traces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jax_iser.replay.traces.counts import CountTrace
from jax_iser.replay.traces.errors import LIMITS, TraceError, check_size
from jax_iser.replay.traces.npz import checked_experts
from jax_iser.replay.traces.sglang import dense_counts


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


_MEGATRON = ("step", "stage", "block", "layer", "rank")


def read_megatron(paths: Sequence[Path], name: str, num_experts: int | None = None) -> CountTrace:
    """Megatron's `router_trace_rank*.jsonl`, a file a rank, read line by line into counts."""
    experts = checked_experts(paths[0], None, num_experts)
    counts: dict[tuple, np.ndarray] = {}  # by (step, layer, rank)
    widths: set[int] = set()
    for path in paths:
        for number, record in _lines(path):
            step, layer, rank, ids = _record(path, number, record, experts)
            widths.add(ids.shape[1])
            found = np.bincount(ids[ids >= 0], minlength=experts)
            key = (step, layer, rank)
            counts[key] = counts[key] + found if key in counts else found
    steps = sorted({step for step, _, _ in counts})
    layers = sorted({layer for _, layer, _ in counts})
    ranks = sorted({rank for _, _, rank in counts})
    if not counts:
        raise TraceError(paths[0], "file", "no record", "lines with top_indices")
    check_size(paths[0], "layers", len(layers), LIMITS.layers)
    zero = np.zeros(experts, np.int64)

    def read_steps():
        for step in steps:
            rows = [[counts.get((step, la, r), zero) for la in layers] for r in ranks]
            yield np.array(rows)

    top_k = widths.pop() if len(widths) == 1 else 0
    sizes = (len(steps), len(layers), experts)
    return CountTrace(paths[0], name, *sizes, read_steps, len(ranks), top_k)


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
    where = f"line {number}"
    if not isinstance(record, dict) or "top_indices" not in record:
        raise TraceError(path, where, type(record).__name__, "a record with top_indices")
    values = [
        check_size(path, f"{where} {field}", record.get(field), 2**31, low=0) for field in _MEGATRON
    ]
    try:
        ids = np.array(record["top_indices"], dtype=np.int64)
    except (ValueError, TypeError, OverflowError) as error:
        raise TraceError(path, f"{where} top_indices", error, "lists of equal length") from None
    width = record.get("topk", ids.shape[-1])
    expected = (record.get("num_tokens", len(ids)), width)
    if ids.ndim != 2 and ids.size:
        raise TraceError(path, f"{where} top_indices", f"shape {ids.shape}", "[tokens][topk]")
    if ids.ndim == 2 and ids.shape != expected:
        raise TraceError(path, f"{where} top_indices", f"shape {ids.shape}", f"{expected}")
    if ids.size and not -1 <= ids.min() <= ids.max() < experts:
        found = f"ids {ids.min()} to {ids.max()}"
        raise TraceError(path, f"{where} top_indices", found, f"ids from -1 to {experts - 1}")
    step, stage, block, layer, rank = values
    return step, (stage, block, layer), rank, ids.reshape(len(ids), -1)
