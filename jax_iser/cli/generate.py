"""Continues a prompt with the byte-level MoE language model, on one device."""

from __future__ import annotations

import argparse
import codecs
import os
import sys

from jax_iser.cli import _devices, _model
from jax_iser.cli._output import UsageError, number

EXAMPLE = 'jax-iser generate --prompt "def fibonacci(n):" --tokens 200 --temperature 0.5'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _model.add_model_argument(parser)
    add = parser.add_argument
    add("--prompt", required=True, help="text to continue; '-' reads standard input")
    add(
        "--tokens",
        metavar="N",
        type=number(int, 1),
        default=200,
        help="bytes to add at most (default 200)",
    )
    add(
        "--temperature",
        metavar="T",
        type=number(float, 0, 100),
        default=0.8,
        help="0 takes the likeliest byte each time (default 0.8)",
    )
    add(
        "--seed",
        metavar="N",
        type=number(int, 0, 2**32 - 1),
        default=0,
        help="of the sampling (default 0)",
    )


def run(args: argparse.Namespace) -> int:
    path = _model.model_directory(args)
    prompt = sys.stdin.buffer.read() if args.prompt == "-" else os.fsencode(args.prompt)
    if 0 in prompt:
        raise UsageError("--prompt holds a zero byte, which separates documents; leave it out")
    _devices.force_devices(1, "generate")
    _model.load_config(path)
    model = _model.load_model(path)
    from jax_iser.models.generate import stream

    # The prompt comes back first, then bytes as they are made; a character may span several.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    _write(decoder.decode(prompt))
    for byte in stream(model, prompt, args.tokens, args.temperature, args.seed):
        _write(decoder.decode(bytes([byte])))
    _write(decoder.decode(b"", final=True) + "\n")
    return 0


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
