"""TensorRT-LLM's expert statistics: `meta_info.json` beside `rank{r}.safetensors`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from jax_iser.replay.traces.counts import CountTrace
from jax_iser.replay.traces.errors import LIMITS, TraceError, check_size
from jax_iser.replay.traces.npz import checked_experts
from jax_iser.replay.traces.text import parse_json


def read_tensorrt_llm(folder: Path, num_experts: int | None = None) -> CountTrace:
    """A folder of statistics; each rank's counts are those of its own tokens.

    Keys are `{iteration}_{layer}`, values counts `[E]`; all ranks hold the same keys.
    """
    meta = _meta(folder / "meta_info.json")
    experts = checked_experts(folder / "meta_info.json", meta["num_experts"], num_experts)
    files = _rank_files(folder)
    keys = {rank: _keys(path) for rank, path in files.items()}
    first = min(files)
    for rank, mine in keys.items():
        if mine != keys[first]:
            odd = sorted(mine ^ keys[first])[:3]
            raise TraceError(files[rank], "keys", f"{odd} not in all ranks", "the same keys")
    steps, layers = (sorted({key[i] for key in keys[first]}) for i in range(2))
    if len(keys[first]) != len(steps) * len(layers):
        found = f"{len(keys[first])} keys"
        expected = f"{len(steps)} iterations x {len(layers)} layers"
        raise TraceError(files[first], "keys", found, expected)
    check_size(folder, "layers", len(layers), LIMITS.layers)

    def read_steps() -> Iterator[np.ndarray]:
        for step in steps:
            ranks = [_counts(files[rank], step, layers, experts) for rank in sorted(files)]
            yield np.stack(ranks)

    sizes = (len(steps), len(layers), experts)
    top_k = meta.get("num_experts_per_token", 0)
    return CountTrace(folder, folder.name, *sizes, read_steps, len(files), top_k)


def _meta(path):
    if path.stat().st_size > 2**20:
        raise TraceError(path, "file", f"{path.stat().st_size} bytes", "at most 1 MiB")
    meta = parse_json(path, "file", path.read_bytes())
    if not isinstance(meta, dict) or "num_experts" not in meta:
        raise TraceError(path, "num_experts", "nothing", "a number of experts")
    check_size(path, "num_experts", meta["num_experts"], LIMITS.experts)
    return meta


def _rank_files(folder):
    files = {}
    for path in sorted(folder.iterdir()):
        if match := re.fullmatch(r"rank(\d+)\.safetensors", path.name):
            files[int(match[1])] = path
    if not files:
        raise TraceError(folder, "files", "no rank*.safetensors", "one for each rank")
    if sorted(files) != list(range(len(files))) or len(files) > LIMITS.ranks:
        raise TraceError(folder, "files", f"ranks {sorted(files)[:8]}", "0, 1, ... without gap")
    return files


def _open(path):
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError, ValueError) as error:
        raise TraceError(path, "header", f"a broken file ({error})", "safetensors") from None


def _keys(path) -> set[tuple[int, int]]:
    with _open(path) as file:
        names = list(file.keys())
    pairs = [re.fullmatch(r"(\d{1,12})_(\d{1,6})", name) for name in names]
    if None in pairs:
        odd = names[pairs.index(None)]
        raise TraceError(path, "keys", repr(odd[:40]), "{iteration}_{layer}")
    return {(int(pair[1]), int(pair[2])) for pair in pairs if pair}


def _counts(path, step, layers, experts):
    with _open(path) as file:
        rows = []
        for layer in layers:
            try:
                row = file.get_tensor(f"{step}_{layer}")
            except (SafetensorError, TypeError, AttributeError) as error:
                raise TraceError(path, f"{step}_{layer}", error, "integers") from None
            if row.shape != (experts,) or row.dtype.kind not in "iu":
                found = f"{row.dtype} of shape {row.shape}"
                raise TraceError(path, f"{step}_{layer}", found, f"integers [{experts}]")
            rows.append(row.astype(np.int64))
    return np.stack(rows)
