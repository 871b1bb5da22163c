"""The figures of a prefill, as JSON has them, and the trace of its routing."""

from __future__ import annotations

import numpy as np

from jax_iser.prefill import ArmRecord, Measurement, imbalance


def summarize(args, model: str, config, measurement: Measurement) -> dict:
    """Sums over the chunks (bytes, broadcasts, seconds), and means (imbalance).

    docs/cli.md describes the keys. What an arm that did not run would have given is None.
    """
    off, on, fb = (measurement.arms.get(arm) for arm in ("off", "on", "fb"))
    read = off or on
    busy = {arm: _busy_by_layer(measurement.arms.get(arm)) for arm in ("off", "on", "fb")}
    unbalanced = None if read is None else imbalance(read.load_before)
    balanced = None if on is None else imbalance(on.load)
    return {
        "model": model,
        "ep": args.ep,
        "slots": args.slots,
        "tokens_per_rank": args.tokens_per_rank,
        "sequence_length": args.sequence_length,
        "ranks_per_device": args.ranks_per_device,
        "min_group_size": args.min_group_size,
        "method": args.method,
        "weight_dtype": args.weight_dtype,
        "platform": args.platform,
        "seconds_of": measurement.seconds_of,
        "arms": list(args.arms),
        "chunks": len(next(iter(measurement.arms.values())).load),
        "repeats": args.repeats,
        "text_bytes": measurement.num_text_bytes,
        "bits_per_byte": read and float(read.bits.sum() / max(measurement.num_text_bytes, 1)),
        "bitwise_equal": measurement.bitwise_equal,
        "imbalance_off_mean": _mean(unbalanced),
        "imbalance_on_mean": _mean(balanced),
        "imbalance_fb_mean": _mean(fb and imbalance(fb.load)),
        "busy_max_off_s": _sum(busy["off"]),
        "busy_max_on_s": _sum(busy["on"]),
        "busy_max_fb_s": _sum(busy["fb"]),
        "copied_bytes": on and int(on.copied_bytes.sum(dtype=np.float64)),
        "tokens_per_s": {arm: _rate(arm, measurement) for arm in ("off", "on", "fb")},
        "logits_sha256": {
            arm: record.logits_sha256 for arm, record in measurement.arms.items() if arm != "fb"
        },
        "layers": [
            {
                "layer": layer,
                "imbalance_off": _mean(unbalanced, layer),
                "imbalance_on": _mean(balanced, layer),
                "broadcasts": on and int(on.broadcasts[:, layer].sum()),
                "remote_copies": on and int(on.copies[:, layer].sum()),
                "copied_bytes": on and int(on.copied_bytes[:, layer].sum(dtype=np.float64)),
                "busy_max_off_s": None if busy["off"] is None else float(busy["off"][layer]),
                "busy_max_on_s": None if busy["on"] is None else float(busy["on"][layer]),
            }
            for layer in range(config.num_layers)
        ],
    }


def _busy_by_layer(record: ArmRecord | None) -> np.ndarray | None:
    """Seconds of the slowest rank or GPU of each layer call, summed over the chunks: `[layers]`."""
    if record is None or record.busy is None:
        return None
    return record.busy.max(-1).sum(0)


def _mean(values, layer=None) -> float | None:
    if values is None:
        return None
    return float(values.mean() if layer is None else values[:, layer].mean())


def _sum(values) -> float | None:
    return None if values is None else float(values.sum())


def _rate(arm: str, measurement: Measurement) -> float | None:
    record = measurement.arms.get(arm)
    if record is None:
        return None
    return measurement.tokens_per_chunk * record.seconds.size / float(record.seconds.sum())


def write_trace(
    path: str, num_experts: int, num_ranks: int, sequence_length: int, measurement: Measurement
) -> None:
    """Writes the router's choices in the trace format that `jax-iser replay` reads.

    Tokens are in the order read: chunk by chunk, in a chunk rank by rank. A sequence is a request.
    """
    record = measurement.arms.get("off") or measurement.arms["on"]
    chunks, tokens, layers, top_k = record.topk_ids.shape
    ids = record.topk_ids.reshape(-1, layers, top_k)
    rank = np.repeat(np.arange(num_ranks, dtype=np.int32), tokens // num_ranks)
    with open(path, "wb") as file:  # by name, NumPy would append .npz
        np.savez_compressed(
            file,
            topk_ids=ids.astype(np.uint8 if num_experts <= 256 else np.int16),
            request_lengths=np.full(chunks * tokens // sequence_length, sequence_length, np.int32),
            num_experts=np.int32(num_experts),
            source_rank=np.tile(rank, chunks),
        )
