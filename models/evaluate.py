"""How well a model predicts a text, and how it would load expert-parallel ranks with it.

python -m jax_iser.models.evaluate --jsonl gsm8k_test.jsonl.gz --sources /usr/lib/python3.11
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_iser.plan import plan_counts

from .checkpoint import default_directory, from_pretrained
from .data import SEPARATOR, is_held_out, read_jsonl, read_sources, sequences, to_stream
from .lm import MoELM, prefill


@functools.partial(nnx.jit, static_argnames=("num_ranks",))
def _score(model, inputs, targets, *, num_ranks):
    """Bits of every target `[batch, seq]`, and routes by layer, rank and expert."""
    logits, layers = prefill(model, inputs)
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
    ids = jnp.stack([layer["topk_ids"] for layer in layers])
    ids = ids.reshape(len(layers), -1, num_ranks, inputs.shape[1] * ids.shape[-1])
    one_hot = jax.nn.one_hot(ids, model.config.num_experts, dtype=jnp.int32)
    return -log_probs / jnp.log(2.0), one_hot.sum(-2).swapaxes(0, 1)


def evaluate(
    model: MoELM, stream: np.ndarray, *, seq_len: int = 512, num_ranks: int = 8, chunks: int = 1
) -> tuple[float, np.ndarray]:
    """Reads a stream in chunks of `num_ranks` consecutive sequences, one a rank.

    Args:
      stream: bytes with separators (`models.data.to_stream`). Every sequence starts with an empty
        context; bytes past the last whole chunk are left out.
      chunks: chunks in one forward pass.

    Returns:
      Bits a byte over all targets but separators, and routes by expert,
      `[chunks, layers, num_ranks, num_experts] i32`.
    """
    inputs, targets = sequences(stream, seq_len)
    whole = len(inputs) // (num_ranks * chunks) * num_ranks * chunks
    if whole == 0:
        raise ValueError(
            f"the text fills {len(inputs)} sequences of {seq_len}, fewer than the "
            f"{num_ranks * chunks} of {chunks} chunks on {num_ranks} ranks"
        )
    bits, size, counts = 0.0, 0, []
    for start in range(0, whole, num_ranks * chunks):
        batch = slice(start, start + num_ranks * chunks)
        loss, count = _score(model, inputs[batch], targets[batch], num_ranks=num_ranks)
        is_text = targets[batch] != SEPARATOR
        bits += float(np.asarray(loss, np.float64)[is_text].sum())
        size += int(is_text.sum())
        counts.append(np.asarray(count))
    return bits / size, np.concatenate(counts)


def imbalance(counts: np.ndarray, num_ranks: int = 8) -> np.ndarray:
    """R of every chunk and layer, `[chunks, layers]`, from `evaluate`'s counts, no balancing."""
    load = counts.sum(2).reshape(*counts.shape[:2], num_ranks, -1).sum(-1)
    return load.max(-1) / load.mean(-1)


def balanced_imbalance(counts: np.ndarray, num_helper_slots: int = 4) -> np.ndarray:
    """R of every chunk and layer, `[chunks, layers]`, under HALO-Q with default groups."""
    plan_of = functools.partial(plan_counts, num_helper_slots=num_helper_slots)
    ratios = [
        [plan.load.max() / plan.load.mean() for plan in map(plan_of, chunk)] for chunk in counts
    ]
    return np.array(ratios)


def read_text(args: argparse.Namespace) -> dict[str, np.ndarray]:
    """The streams that the arguments name."""
    streams = {path: to_stream(read_jsonl(path)) for path in args.jsonl}
    for root in args.sources:
        sources = read_sources(root)
        held_out = (text for name, text in sources.items() if is_held_out(name))
        streams[f"{root}, held-out files"] = to_stream(held_out)
    return streams


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="evaluate", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(default_directory()), help="model directory")
    parser.add_argument("--jsonl", nargs="*", default=[], help="gzipped JSON lines with 'text'")
    parser.add_argument("--sources", nargs="*", default=[], help="Python source trees")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--max-bytes", type=int, default=None, help="of each text")
    args = parser.parse_args(argv)
    model = from_pretrained(args.model, balance="none")
    for name, stream in read_text(args).items():
        began = time.monotonic()
        bits, counts = evaluate(
            model, stream[: args.max_bytes], seq_len=args.seq_len, num_ranks=args.ranks
        )
        ratio = imbalance(counts, args.ranks)
        result = {
            "text": name,
            "bits_per_byte": round(bits, 4),
            "chunks": len(counts),
            "imbalance_mean": round(float(ratio.mean()), 4),
            "imbalance_haloq_mean": round(float(balanced_imbalance(counts).mean()), 5),
            "imbalance_layers": [round(float(r), 4) for r in ratio.mean(0)],
            "seconds": round(time.monotonic() - began, 1),
        }
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
