"""Our `.npz` and vLLM's `.npy`: routed experts `[tokens, layers, top_k]`, streamed."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jax_iser.replay.traces.archive import (
    Header,
    member_header,
    open_archive,
    read_array,
    read_header,
    reading,
    stream_rows,
)
from jax_iser.replay.traces.errors import LIMITS, TraceError, check_size
from jax_iser.replay.traces.tokens import TokenTrace


def check_topk_ids(path, field: str, header: Header) -> None:
    """Refuses an array that is not integers `[tokens, layers, top_k]` within the limits."""
    if len(header.shape) != 3 or header.dtype.kind not in "iu":
        raise TraceError(
            path,
            field,
            f"{header.dtype} of shape {header.shape}",
            "integers [tokens, layers, top_k]",
        )
    limits = (("tokens", LIMITS.tokens), ("layers", LIMITS.layers), ("top_k", LIMITS.top_k))
    for (what, limit), size in zip(limits, header.shape, strict=True):
        check_size(path, f"{field} {what}", size, limit)


def checked_experts(path, num_experts, option: int | None) -> int:
    """The number of experts, from the trace or from the caller; one of them must know."""
    if num_experts is None and option is None:
        raise TraceError(path, "num_experts", "nothing", "a number: give it by --num-experts")
    if None not in (num_experts, option) and num_experts != option:
        raise TraceError(path, "num_experts", num_experts, f"{option}, as --num-experts says")
    known = option if num_experts is None else num_experts
    return check_size(path, "num_experts", known, LIMITS.experts)


def check_ids(path, field: str, block: np.ndarray, num_experts: int, start: int = 0) -> np.ndarray:
    """Refuses ids that are neither an expert's nor -1, which is padding.

    Args:
      block: `[tokens, layers, top_k]` integers.
      start: index of the block's first token, for the message.
    """
    if block.size and not -1 <= int(block.min()) <= int(block.max()) < num_experts:
        wrong = (block < -1) | (block >= num_experts)
        token, layer, place = np.argwhere(wrong)[0]
        raise TraceError(
            path,
            field,
            f"expert id {block[token, layer, place]} of token {start + token}, layer {layer}, "
            f"place {place}",
            f"ids from 0 to {num_experts - 1}, or -1 for padding",
        )
    return block


def check_id_type(path, field: str, dtype: np.dtype, num_experts: int) -> None:
    """Refuses a type too narrow for the ids: those above its range have wrapped."""
    if np.iinfo(dtype).max < num_experts - 1:
        raise TraceError(
            path,
            field,
            f"{dtype}, which ends at {np.iinfo(dtype).max}",
            f"a type that holds the ids of {num_experts} experts, such as int16",
        )


def checked_blocks(path, field: str, blocks, num_experts: int) -> Iterator[np.ndarray]:
    """Blocks of one trace, each with its ids checked."""
    start = 0
    for block in blocks:
        yield check_ids(path, field, block, num_experts, start)
        start += len(block)


def read_npz(path, num_experts: int | None = None) -> TokenTrace:
    """Our trace: `topk_ids [tokens, layers, top_k]`, with `request_lengths [requests]`,
    `source_rank [tokens]` and `num_experts []` where they are known."""
    with open_archive(path) as archive:
        names = {name.removesuffix(".npy") for name in archive.namelist()}
        if "topk_ids" not in names:
            found = ", ".join(sorted(names)[:5]) or "no arrays"
            raise TraceError(path, "topk_ids", f"an archive of {found}", "an array topk_ids")
        header = member_header(path, archive, "topk_ids")
        check_topk_ids(path, "topk_ids", header)
        lengths = _optional(path, archive, names, "request_lengths")
        source = _optional(path, archive, names, "source_rank")
        stated = _optional(path, archive, names, "num_experts")
    if stated is not None:
        if stated.shape != () or stated.dtype.kind not in "iu":
            found = f"{stated.dtype} of shape {stated.shape}"
            raise TraceError(path, "num_experts", found, "an integer scalar")
        stated = int(stated)
    experts = checked_experts(path, stated, num_experts)
    check_id_type(path, "topk_ids", header.dtype, experts)

    def blocks(rows: int) -> Iterator[np.ndarray]:
        with zipfile.ZipFile(path) as archive, archive.open("topk_ids.npy") as stream:
            stream.read(header.offset)
            parts = stream_rows(path, "topk_ids", header, stream, rows)
            yield from checked_blocks(path, "topk_ids", parts, experts)

    tokens, layers, top_k = header.shape
    _check_source(path, source, tokens)
    notes = () if lengths is not None else ("no request_lengths: the tokens are one request",)
    name = Path(path).stem
    return TokenTrace(path, name, tokens, layers, top_k, experts, blocks, lengths, source, notes)


def _optional(path, archive, names, name):
    return read_array(path, archive, name) if name in names else None


def _check_source(path, source, tokens):
    if source is None:
        return
    if source.shape != (tokens,) or source.dtype.kind not in "iu":
        found = f"{source.dtype} of shape {source.shape}"
        raise TraceError(path, "source_rank", found, f"integers [{tokens}]")
    if source.size and not 0 <= source.min() <= source.max() < LIMITS.ranks:
        found = f"ranks {source.min()} to {source.max()}"
        raise TraceError(path, "source_rank", found, f"ranks from 0 to {LIMITS.ranks - 1}")


def read_npy(path, num_experts: int | None = None) -> TokenTrace:
    """vLLM's routed experts: one `.npy` of integers `[tokens, moe_layers, top_k]`."""
    with open(path, "rb") as stream:
        header = read_header(path, "array", stream)
    check_topk_ids(path, "array", header)
    size = Path(path).stat().st_size
    if header.offset + header.nbytes != size:
        raise TraceError(path, "array", f"{size - header.offset} bytes", f"{header.nbytes}")
    experts = checked_experts(path, None, num_experts)
    check_id_type(path, "array", header.dtype, experts)

    def blocks(rows: int) -> Iterator[np.ndarray]:
        with open(path, "rb") as stream, reading(path, "array"):
            stream.seek(header.offset)
            parts = stream_rows(path, "array", header, stream, rows)
            yield from checked_blocks(path, "array", parts, experts)

    tokens, layers, top_k = header.shape
    notes = ("no request lengths: the tokens are one request",)
    name = Path(path).stem
    return TokenTrace(path, name, tokens, layers, top_k, experts, blocks, notes=notes)


def write_npz(path, topk_ids, request_lengths, num_experts: int, source_rank=None) -> None:
    """Writes our trace, uncompressed, so that it can be read in blocks."""
    arrays: dict[str, Any] = {
        "topk_ids": np.asarray(topk_ids),
        "request_lengths": np.asarray(request_lengths, np.int32),
        "num_experts": np.int32(num_experts),
    }
    if source_rank is not None:
        arrays["source_rank"] = np.asarray(source_rank, np.int32)
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, np.asarray(array, order="C"), allow_pickle=False)
