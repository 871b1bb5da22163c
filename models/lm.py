"""A small decoder-only MoE language model in Flax NNX on `jax_iser.nnx.MoE`."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_iser.domain.config import dtype_name
from jax_iser.nnx import MoE

from .config import ModelConfig


class KeyValueCache(NamedTuple):
    """Keys and values of the positions seen, `[batch, max_len, kv_heads, head_dim]` each."""

    key: jax.Array
    value: jax.Array


def rotary(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding of `x [batch, seq, heads, head_dim]`, halves as the pairs."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[:, None, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square norm in f32 over the last axis, with a learned scale."""

    def __init__(self, size: int, eps: float):
        self.scale = nnx.Param(jnp.ones(size, jnp.float32))
        self.eps = eps

    def __call__(self, x):
        wide = x.astype(jnp.float32)
        mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
        return (wide * jax.lax.rsqrt(mean + self.eps) * self.scale[...]).astype(x.dtype)


class Attention(nnx.Module):
    """Causal grouped-query attention with rotary positions and normed queries and keys."""

    def __init__(self, config: ModelConfig, *, implementation, param_dtype, rngs):
        c, init = config, nnx.initializers.lecun_normal()
        queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        make = lambda shape: nnx.Param(init(rngs.params(), shape, param_dtype))  # noqa: E731
        self.query, self.key = make((c.hidden_size, queries)), make((c.hidden_size, keys))
        self.value, self.out = make((c.hidden_size, keys)), make((queries, c.hidden_size))
        self.query_norm = RMSNorm(c.head_dim, c.norm_eps)
        self.key_norm = RMSNorm(c.head_dim, c.norm_eps)
        self.config, self.implementation = config, implementation

    def __call__(self, x, start, cache):
        batch, seq, _ = x.shape
        heads = (batch, seq, -1, self.config.head_dim)
        positions = start + jnp.arange(seq)
        project = lambda weight: (x @ weight[...].astype(x.dtype)).reshape(heads)  # noqa: E731
        query, key, value = project(self.query), project(self.key), project(self.value)
        query = rotary(self.query_norm(query), positions, self.config.rope_theta)
        key = rotary(self.key_norm(key), positions, self.config.rope_theta)
        if cache is None:
            attended = jax.nn.dot_product_attention(
                query, key, value, is_causal=True, implementation=self.implementation
            )
        else:
            update = jax.lax.dynamic_update_slice_in_dim
            cache = KeyValueCache(
                update(cache.key, key, start, axis=1), update(cache.value, value, start, axis=1)
            )
            seen = jnp.arange(cache.key.shape[1]) <= positions[:, None]
            attended = jax.nn.dot_product_attention(
                query, cache.key, cache.value, mask=seen[None, None]
            )
        return attended.reshape(batch, seq, -1) @ self.out[...].astype(x.dtype), cache


class Block(nnx.Module):
    """Pre-norm attention and MoE, each with a residual."""

    def __init__(self, config: ModelConfig, layer, *, attention, param_dtype, rngs, **moe_options):
        c = config
        self.attention_norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.attention = Attention(c, implementation=attention, param_dtype=param_dtype, rngs=rngs)
        self.moe_norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.moe = MoE(
            c.hidden_size,
            c.intermediate_size,
            num_experts=c.num_experts,
            top_k=c.top_k,
            score_function=c.score_function,
            routed_bias=c.routed_bias,
            routed_scaling_factor=c.routed_scaling_factor,
            norm_topk_prob=c.norm_topk_prob,
            num_shared_experts=c.num_shared_experts,
            shared_intermediate_size=c.shared_intermediate_size if c.num_shared_experts else None,
            param_dtype=param_dtype,
            layer=layer,
            rngs=rngs,
            **moe_options,
        )

    def __call__(self, x, start, cache, **options):
        attended, cache = self.attention(self.attention_norm(x), start, cache)
        x = x + attended
        return x + self.moe(self.moe_norm(x), **options), cache


class MoELM(nnx.Module):
    """The language model; see `ModelConfig`.

    Args:
      config: its sizes.
      dtype: of activations and matmuls; norms, router and logits are f32.
      param_dtype: of the weights but norms and router.
      weight_dtype: of the routed experts: None, for param_dtype, or float8_e4m3fn.
      mesh, axis: with a mesh, sequences are sharded over `axis` (attention is data parallel) and
        experts are spread over it. Its axes must be of type Auto.
      balance, method: see `jax_iser.nnx.MoE`.
      attention: `implementation` of `jax.nn.dot_product_attention`.
      rngs: `nnx.Rngs` with a `params` stream.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        weight_dtype=None,
        mesh: jax.sharding.Mesh | None = None,
        axis: str = "ep",
        balance: str = "haloq",
        method: str | None = None,
        attention: str | None = None,
        rngs: nnx.Rngs,
    ):
        if mesh is not None and not mesh.are_all_axes_auto:
            raise ValueError(
                f"the mesh has axis types {mesh.axis_types}; make it with "
                "axis_types=(jax.sharding.AxisType.Auto,)"
            )
        self.config, self.dtype, self.mesh, self.axis = config, jnp.dtype(dtype), mesh, axis
        self.weight_dtype = dtype_name(weight_dtype)
        normal = nnx.initializers.normal(1.0)
        vocab, hidden = config.vocab_size, config.hidden_size
        self.embedding = nnx.Param(normal(rngs.params(), (vocab, hidden), param_dtype))
        self.layers = nnx.List(
            Block(
                config,
                layer,
                attention=attention,
                param_dtype=param_dtype,
                weight_dtype=weight_dtype,
                mesh=mesh,
                axis=axis,
                balance=balance,
                method=method,
                rngs=rngs,
            )
            for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(hidden, config.norm_eps)
        head = nnx.initializers.lecun_normal()(rngs.params(), (hidden, vocab), param_dtype)
        self.head = nnx.Param(head)
        if mesh is not None:
            _replicate(self, NamedSharding(mesh, P()))

    def __call__(
        self, tokens: jax.Array, *, domain=None, forced_routing: str | None = None
    ) -> jax.Array:
        """Next-byte logits `[batch, seq, vocab] f32` of `tokens [batch, seq] i32`.

        With a mesh, batch must be a multiple of its devices; a device's rows are its ranks'
        sequences in rank order. `domain` and `forced_routing` go to every MoE layer.
        """
        logits, _ = self._run(tokens, 0, None, domain=domain, forced_routing=forced_routing)
        return logits

    def decode(
        self, tokens: jax.Array, start: jax.Array, caches: list[KeyValueCache]
    ) -> tuple[jax.Array, list[KeyValueCache]]:
        """Logits of `tokens` at positions `start...` and the caches with their keys and values."""
        return self._run(tokens, start, caches)

    def empty_caches(self, batch: int, max_len: int) -> list[KeyValueCache]:
        """Caches for `decode`, for up to `max_len` positions."""
        shape = (batch, max_len, self.config.num_kv_heads, self.config.head_dim)
        zeros = jnp.zeros(shape, self.dtype)
        return [KeyValueCache(zeros, zeros) for _ in self.layers]

    def _run(self, tokens, start, caches, **options):
        # Looked up in f32: its gradient is a sum over many tokens, wrong and slow in bf16.
        x = self._shard(self.embedding[...].astype(jnp.float32)[tokens].astype(self.dtype))
        new_caches = []
        for layer, cache in zip(self.layers, caches or [None] * len(self.layers), strict=True):
            x, cache = layer(x, start, cache, **options)
            x = self._shard(x)
            new_caches.append(cache)
        logits = jnp.einsum(
            "bsd,dv->bsv",
            self.norm(x),
            self.head[...].astype(self.dtype),
            preferred_element_type=jnp.float32,
        )
        return logits, new_caches

    def _shard(self, x):
        if self.mesh is None:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(self.axis)))


def _replicate(model, sharding):
    """Places on the whole mesh every variable that its module left on one device."""
    for _, variable in nnx.to_flat_state(nnx.state(model)):
        value = variable.get_value()
        if isinstance(value, jax.core.Tracer) or isinstance(value.sharding, NamedSharding):
            continue
        variable.set_value(jax.device_put(value, sharding))


def prefill(
    model: MoELM, tokens: jax.Array, *, domain=None, forced_routing: str | None = None
) -> tuple[jax.Array, list[dict]]:
    """One forward pass and what its MoE layers did; pure, for use under `jax.jit` or `nnx.jit`.

    Returns:
      `(logits [batch, seq, vocab] f32, layers)`: one dict a layer with `jax_iser.nnx`'s
      `plan_telemetry` arrays, the `plan` and `topk_ids [batch*seq, top_k] i32`.
    """

    def forward(model):
        return model(tokens, domain=domain, forced_routing=forced_routing)

    logits, recorded = nnx.capture(forward, nnx.Intermediate)(model)
    layers = recorded["layers"]
    return logits, [
        {
            name: value[0]
            for name, value in nnx.to_pure_dict(layers[i]["moe"]).items()
            if name != "router_logits"  # tokens x experts of each layer: larger than all the rest
        }
        for i in range(len(model.layers))
    ]


def bits_per_byte(logits: jax.Array, targets: jax.Array, ignore: int = 0) -> jax.Array:
    """Mean bits a byte of `targets [batch, seq]` under `logits`, without the byte `ignore`."""
    counted = targets != ignore
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
    total = -jnp.sum(jnp.where(counted, log_probs, 0.0))
    return total / jnp.log(2.0) / jnp.maximum(counted.sum(), 1)
