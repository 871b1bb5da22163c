"""Continue a prompt, byte by byte, with a key-value cache."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx

from .data import SEPARATOR
from .lm import MoELM


@functools.partial(jax.jit, static_argnames=("graphdef", "greedy"))
def _next(graphdef, state, tokens, start, caches, temperature, key, *, greedy):
    """The next byte `[1, 1] i32` and the caches, from the bytes `tokens` at `start`."""
    logits, caches = nnx.merge(graphdef, state).decode(tokens, start, caches)
    logits = logits[0, -1]
    choice = jnp.argmax(logits) if greedy else jax.random.categorical(key, logits / temperature)
    return choice.astype(jnp.int32)[None, None], caches


def stream(
    model: MoELM, prompt: bytes, max_new_tokens: int, temperature: float = 0.8, seed: int = 0
) -> Iterator[int]:
    """Yields the bytes that follow `prompt` until the document ends or `max_new_tokens` are out.

    Args:
      model: made with `mesh=None`.
      prompt: the text so far; it follows a document separator, as in training.
      temperature: 0 takes the likeliest byte each time (ties: the lower byte).
      seed: of the sampling; the same seed gives the same text on the same platform.

    Raises:
      ValueError: a negative temperature or length, or a model on a mesh.
    """
    if model.mesh is not None:
        raise ValueError("generation runs on one device: make the model with mesh=None")
    if temperature < 0 or max_new_tokens < 0:
        raise ValueError(
            f"temperature={temperature} and max_new_tokens={max_new_tokens} must be at least 0"
        )
    tokens = jnp.asarray([[SEPARATOR, *prompt]], jnp.int32)
    caches = model.empty_caches(1, tokens.shape[1] + max_new_tokens)
    graphdef, state = nnx.split(model)
    step = functools.partial(_next, graphdef, state, greedy=temperature == 0)
    key, start = jax.random.key(seed), 0
    for index in range(max_new_tokens):
        step_key = jax.random.fold_in(key, index)
        choice, caches = step(tokens, jnp.int32(start), caches, temperature, step_key)
        start, tokens = start + tokens.shape[1], choice
        byte = int(choice[0, 0])
        if byte == SEPARATOR:
            return
        yield byte


def generate(
    model: MoELM, prompt: bytes, max_new_tokens: int, temperature: float = 0.8, seed: int = 0
) -> bytes:
    """The continuation of `prompt` as bytes, without the prompt; arguments as `stream`."""
    return bytes(stream(model, prompt, max_new_tokens, temperature, seed))
