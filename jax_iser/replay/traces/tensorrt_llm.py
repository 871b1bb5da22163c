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
from jax_iser.replay.traces.tokens import layers_left_out


def read_tensorrt_llm(folder: Path, num_experts: int | None = None) -> CountTrace:
    """A folder of statistics; each rank's counts are those of its own tokens.

    Keys are `{iteration}_{layer}`, values counts `[E]`. A rank that ran no token of an iteration
    may lack its keys; what else the recorder writes beside these files is not read.
    """
    meta = _meta(folder / "meta_info.json")
    experts = checked_experts(folder / "meta_info.json", meta["num_experts"], num_experts)
    files = _rank_files(folder)
    keys = {rank: _keys(path) for rank, path in files.items()}
    every = set().union(*keys.values())
    steps, layers = (sorted({key[i] for key in every}) for i in range(2))
    if not every or len(every) != len(steps) * len(layers):
        found = f"{len(every)} keys"
        expected = f"{len(steps)} iterations x {len(layers)} layers, at least 1"
        raise TraceError(folder, "keys", found, expected)
    check_size(folder, "layers", len(layers), LIMITS.layers)
    notes = _missing(keys, every)

    def read_step(step) -> np.ndarray:
        rows = [_counts(files[rank], keys[rank], step, layers, experts) for rank in sorted(files)]
        return np.stack(rows)

    used = np.any([read_step(step).any(axis=(0, 2)) for step in steps], axis=0)
    if not used.any():
        raise TraceError(folder, "counts", "no route at all", "counts above 0")
    notes += layers_left_out(int((~used).sum()))

    def read_steps() -> Iterator[np.ndarray]:
        return (read_step(step)[:, used] for step in steps)

    sizes = (len(steps), int(used.sum()), experts)
    top_k = meta["num_experts_per_token"]
    return CountTrace(folder, folder.name, *sizes, read_steps, len(files), top_k, notes)


def _missing(keys, every) -> tuple[str, ...]:
    """A note on the keys that some ranks lack."""
    lack = {rank: len(every - mine) for rank, mine in keys.items() if every - mine}
    if not lack:
        return ()
    worst = max(lack, key=lambda rank: lack[rank])
    return (
        f"{len(lack)} of {len(keys)} ranks lack some of the {len(every)} iterations and layers "
        f"(rank {worst}: {lack[worst]}): counted as ranks without tokens",
    )


def _meta(path):
    if path.stat().st_size > 2**20:
        raise TraceError(path, "file", f"{path.stat().st_size} bytes", "at most 1 MiB")
    meta = parse_json(path, "file", path.read_bytes())
    if not isinstance(meta, dict) or "num_experts" not in meta:
        raise TraceError(path, "num_experts", "nothing", "a number of experts")
    check_size(path, "num_experts", meta["num_experts"], LIMITS.experts)
    field = "num_experts_per_token"
    top_k = check_size(path, field, meta.get(field, 0), LIMITS.top_k, low=0)
    return {"num_experts": meta["num_experts"], field: top_k}


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


def _counts(path, keys, step, layers, experts):
    """`[L, E] i64` of one rank and iteration."""
    rows = np.zeros((len(layers), experts), np.int64)
    with _open(path) as file:
        for index, layer in enumerate(layers):
            if (step, layer) not in keys:
                continue
            try:
                row = file.get_tensor(f"{step}_{layer}")
            except (SafetensorError, TypeError, AttributeError, ValueError) as error:
                raise TraceError(path, f"{step}_{layer}", error, "integers") from None
            if row.shape != (experts,) or row.dtype.kind not in "iu":
                found = f"{row.dtype} of shape {row.shape}"
                raise TraceError(path, f"{step}_{layer}", found, f"integers [{experts}]")
            rows[index] = row
    return rows
