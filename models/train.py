"""Train the byte-level MoE language model on text files; on one GPU this takes minutes.

    python -m jax_iser.models.train --out my_model --sources /usr/lib/python3.11 \\
        --jsonl gsm8k.jsonl.gz:0.35 --steps 5000
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jax_iser.nnx import RoutedBias

from .checkpoint import save
from .config import ModelConfig
from .data import is_held_out, read_jsonl, read_sources, to_stream
from .evaluate import evaluate, imbalance
from .lm import MoELM

_DEV_SHARE = 0.02


class Corpus(NamedTuple):
    """Training streams end to end on the device, where each lies, and how often it is drawn."""

    tokens: jax.Array
    starts: jax.Array
    lengths: jax.Array
    log_weights: jax.Array


def read_corpus(jsonl: list[str], sources: list[str], seq_len: int):
    """Reads the texts `PATH:WEIGHT`; returns the `Corpus`, dev streams, and counts for the log.

    Of JSON lines the last 2 % of documents are for development, of source trees the held-out
    files; neither is trained on.
    """
    train, dev, weights, about = [], {}, [], []
    for argument, is_tree in [(a, False) for a in jsonl] + [(a, True) for a in sources]:
        path, _, weight = argument.rpartition(":")
        if is_tree:
            files = read_sources(path)
            kept = [text for name, text in files.items() if not is_held_out(name)]
            held = [text for name, text in files.items() if is_held_out(name)]
        else:
            documents = read_jsonl(path)
            cut = len(documents) - max(1, int(_DEV_SHARE * len(documents)))
            kept, held = documents[:cut], documents[cut:]
        train.append(to_stream(kept))
        dev[Path(path).name] = to_stream(held)
        weights.append(float(weight))
        sizes = {"train_bytes": train[-1].size, "dev_bytes": dev[Path(path).name].size}
        numbers = {"train_documents": len(kept), "dev_documents": len(held), **sizes}
        about.append({"text": Path(path).name, "weight": float(weight), **numbers})
    lengths = np.array([len(stream) for stream in train])
    if (lengths <= seq_len).any():
        raise ValueError(f"a text has {lengths.min()} bytes, not more than seq_len={seq_len}")
    corpus = Corpus(
        jnp.asarray(np.concatenate(train)),
        jnp.asarray(np.cumsum(lengths) - lengths),
        jnp.asarray(lengths),
        jnp.log(jnp.asarray(weights)),
    )
    return corpus, dev, about


def sample(corpus: Corpus, key, batch: int, seq_len: int):
    """`batch` windows of `seq_len + 1` bytes, each from a text drawn by weight."""
    text_key, place_key = jax.random.split(key)
    text = jax.random.categorical(text_key, corpus.log_weights, shape=(batch,))
    place = jax.random.uniform(place_key, (batch,))
    start = (place * (corpus.lengths[text] - seq_len - 1)).astype(jnp.int32) + corpus.starts[text]
    return corpus.tokens[start[:, None] + jnp.arange(seq_len + 1)].astype(jnp.int32)


def loss_fn(model: MoELM, window):
    """Mean bits a byte (separators' too: the model must end documents), and loads by layer."""
    forward = nnx.capture(lambda model: model(window[:, :-1]), nnx.Intermediate)
    logits, recorded = forward(model)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, window[:, 1:])
    experts = jnp.arange(model.config.num_experts)
    loads = [
        (recorded["layers"][i]["moe"]["topk_ids"].get_value()[0][..., None] == experts).sum((0, 1))
        for i in range(len(model.layers))
    ]
    return losses.mean() / jnp.log(2.0), jnp.stack(loads)


def balance(bias, loads, rate):
    """DeepSeek-V3's rule: an overloaded expert's selection bias falls by `rate`, others' rise."""
    return bias + rate * jnp.sign(loads.mean() - loads)


def make_optimizer(args):
    """AdamW at a learning rate of 1 (the step scales it); matrices alone decay in weight."""
    decayed = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)  # noqa: E731
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(1.0, b2=0.98, weight_decay=args.weight_decay, mask=decayed),
    )


def learning_rate(args, step, progress):
    """Linear warm-up over steps, then cosine decay to a twentieth over `progress` from 0 to 1."""
    warm = jnp.minimum(1.0, (step + 1) / args.warmup)
    cosine = 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip(progress, 0.0, 1.0)))
    return args.learning_rate * warm * (0.05 + 0.95 * cosine)


def make_train_steps(graphdef, optimizer, corpus, args):
    """A compiled function that takes `args.log_every` steps at a given progress of training."""

    def step(progress, carry, _):
        params, biases, opt_state, index = carry
        window = sample(
            corpus, jax.random.fold_in(jax.random.key(args.seed), index), args.batch, args.seq_len
        )
        loss_of = lambda params: loss_fn(nnx.merge(graphdef, params, biases), window)  # noqa: E731
        (loss, loads), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads)))
        updates, opt_state = optimizer.update(grads, opt_state, params)
        scale = learning_rate(args, index, progress)
        params = optax.apply_updates(params, jax.tree.map(lambda u: u * scale, updates))
        rate = args.balance_rate * jnp.minimum(1.0, 4.0 * (1.0 - progress))
        for (_, bias), load in zip(_in_layer_order(biases), loads, strict=True):
            bias.set_value(balance(bias.get_value(), load, rate))
        load_ratio = (loads.max(-1) / loads.mean(-1)).mean()
        return (params, biases, opt_state, index + 1), (loss, norm, load_ratio)

    def steps(carry, progress):
        one = functools.partial(step, progress)
        carry, metrics = jax.lax.scan(one, carry, None, length=args.log_every)
        return carry, jax.tree.map(jnp.mean, metrics)

    return jax.jit(steps, donate_argnums=0)


def _in_layer_order(biases):
    return sorted(nnx.to_flat_state(biases), key=lambda item: item[0])


def evaluate_all(model, streams, args) -> dict:
    """Bits a byte and R (mean over chunks and layers) of each stream that fills a batch."""
    results = {}
    for name, stream in streams.items():
        if len(stream) > args.eval_chunks * 8 * 512:
            bits, counts = evaluate(model, stream[: args.eval_bytes], chunks=args.eval_chunks)
            ratio = float(imbalance(counts).mean())
            results[name] = {"bits_per_byte": round(bits, 4), "imbalance": round(ratio, 4)}
    return results


def _method_of_scheme(scheme: str) -> str:
    """What `--method` is called now."""
    return {"blocked": "portable"}.get(scheme, scheme)


def parse_arguments(argv):
    parser = argparse.ArgumentParser(prog="train", description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="directory of the model to write")
    text: dict[str, Any] = {"nargs": "*", "default": [], "metavar": "PATH:WEIGHT"}
    parser.add_argument("--jsonl", help="gzipped JSON lines with a 'text' field", **text)
    parser.add_argument("--sources", help="trees of Python source", **text)
    parser.add_argument("--test-jsonl", nargs="*", default=[], help="evaluated once, at the end")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="of the config")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--batch", type=int, default=128, help="sequences a step")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--balance-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--method", default="dense", help="of the MoE: dense or portable")
    parser.add_argument("--scheme", dest="method", type=_method_of_scheme, help=argparse.SUPPRESS)
    parser.add_argument("--attention", default=None, help="cudnn on a GPU")
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--max-seconds", type=float, default=None, help="ends the schedule sooner")
    parser.add_argument("--evals", type=int, default=4, help="evaluations and saves on the way")
    parser.add_argument("--eval-chunks", type=int, default=1, help="chunks in a forward pass")
    parser.add_argument("--eval-bytes", type=int, default=200_000, help="of each text")
    return parser.parse_args(argv)


def train(args) -> MoELM:
    """Trains as the arguments say; writes the model and `training_log.jsonl` as it goes."""
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    config = ModelConfig(
        max_seq_len=args.seq_len, **{k: _literal(v) for k, v in (s.split("=") for s in args.set)}
    )
    corpus, dev, about = read_corpus(args.jsonl, args.sources, args.seq_len)
    options = {"dtype": args.dtype, "attention": args.attention}
    model = MoELM(config, method=args.method, **options, rngs=nnx.Rngs(args.seed))
    graphdef, params, biases = nnx.split(model, nnx.Param, RoutedBias)
    optimizer = make_optimizer(args)
    carry = (params, biases, optimizer.init(params), jnp.int32(0))
    train_steps = make_train_steps(graphdef, optimizer, corpus, args)
    hyper = ["steps", "batch", "seq_len", "learning_rate", "warmup", "weight_decay"]
    hyper += ["balance_rate", "seed", "dtype", "method"]
    size = sum(p.size for p in jax.tree.leaves(params))
    with open(out / "training_log.jsonl", "w") as log:

        def write(record):
            log.write(json.dumps(record) + "\n")
            log.flush()
            print(json.dumps(record), flush=True)

        settings = {name: getattr(args, name) for name in hyper}
        write({"config": dataclasses.asdict(config), "parameters": size, **settings})
        write({"data": about})
        began, done, progress = time.monotonic(), 0, 0.0
        next_eval = 1 / args.evals
        while progress < 1:
            rate = float(learning_rate(args, done, progress))
            carry, (loss, norm, load_ratio) = train_steps(carry, progress)
            done += args.log_every
            seconds = time.monotonic() - began
            progress = max(done / args.steps, seconds / (args.max_seconds or np.inf))
            record = {
                "step": done,
                "tokens": done * args.batch * args.seq_len,
                "train_bits_per_byte": round(float(loss), 4),
                "gradient_norm": round(float(norm), 4),
                "expert_load_max_over_mean": round(float(load_ratio), 4),
                "learning_rate": round(rate, 6),
                "seconds": round(time.monotonic() - began, 1),
            }
            if progress >= min(next_eval, 1):
                next_eval += 1 / args.evals
                model = nnx.merge(graphdef, *carry[:2])
                record["dev"] = evaluate_all(model, dev, args)
                save(model, out)
            write(record)
        if args.test_jsonl:
            tests = {Path(p).name: to_stream(read_jsonl(p)) for p in args.test_jsonl}
            args.eval_bytes = None
            write({"test": evaluate_all(model, tests, args)})
    return model


def _literal(text):
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def main(argv: list[str] | None = None) -> int:
    train(parse_arguments(argv))
    return 0


if __name__ == "__main__":
    sys.exit(main())
