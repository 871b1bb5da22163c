"""`shared_expert`: the gated MLP that runs beside the copies, with a budget of SMs on GPUs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_iser import _extension
from jax_iser.domain.config import check_integer
from jax_iser.experts.activation import SILU, Activation
from jax_iser.methods.fused import ffi


def gated_mlp(x, gate, up, down, activation=SILU):
    """`down(act(gate(x), up(x)))`, weights `[I, D]`, `[I, D]`, `[D, I]`; h in x.dtype."""
    dot = lambda a, w: jnp.einsum("...d,id->...i", a, w, preferred_element_type=jnp.float32)  # noqa: E731
    h = activation(dot(x, gate), dot(x, up)).astype(x.dtype)
    return dot(h, down).astype(x.dtype)


def shared_expert(
    x: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    sms: int | None = None,
    activation: str | Activation = "silu",
) -> jax.Array:
    """`down(act(gate(x), up(x)))`, leaving SMs to the copies that run beside it.

    Args:
      x: `[..., D]`, bf16 or f32.
      gate, up: `[I, D]` of x's dtype.
      down: `[D, I]`.
      sms: SMs that its products may use on a GPU, by cuBLAS. None: XLA's own products, which use
        all. On other platforms there are no SMs, and XLA's products run.
      activation: an `Activation` or the name of one.

    Returns:
      `[..., D]` of x's dtype. cuBLAS rounds the two inner products to it before the activation, XLA
      does not.

    Raises:
      ValueError, TypeError: shapes, dtypes or a budget that do not fit.
    """
    _check(x, gate, up, down, sms)
    activation = Activation.of(activation)
    if sms is None or _extension.iser_cuda is None:
        return gated_mlp(x, gate, up, down, activation)
    return _budgeted(sms, activation, x, gate, up, down)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _budgeted(sms, activation, *operands):
    default = functools.partial(gated_mlp, activation=activation)
    cuda = functools.partial(_call, sms, activation)
    return jax.lax.platform_dependent(*operands, cuda=cuda, default=default)


def _forward(sms, activation, *operands):
    return _budgeted(sms, activation, *operands), operands


def _backward(sms, activation, operands, cotangent):
    _, pull = jax.vjp(functools.partial(gated_mlp, activation=activation), *operands)
    return pull(cotangent)


_budgeted.defvjp(_forward, _backward)


def _call(sms, activation, x, gate, up, down):
    from jax_iser.domain.cuda.runtime import open_cublas

    open_cublas()
    tokens, is_bf16 = x.size // x.shape[-1], x.dtype == jnp.bfloat16
    num_bytes = _extension.iser_cuda.shared_expert_bytes(tokens, gate.shape[0], is_bf16)
    results = (
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct((num_bytes,), jnp.uint8),
    )
    op = jax.ffi.ffi_call(ffi.SHARED_EXPERT, results)
    parameters = {
        name: np.float32(getattr(activation, name) or 0) for name in ("limit", "alpha", "offset")
    }
    attributes = {"num_sms": np.int64(sms), "kind": np.int32(activation.index)} | parameters
    y = op(x, gate, up, down, **attributes)[0]
    return ffi.varying_like(x, (y,))[0]


def _check(x, gate, up, down, sms):
    hidden, inner = x.shape[-1], gate.shape[0]
    for name, plane, shape in (
        ("gate", gate, (inner, hidden)),
        ("up", up, (inner, hidden)),
        ("down", down, (hidden, inner)),
    ):
        if plane.shape != shape:
            raise ValueError(f"{name} has shape {plane.shape}, expected {shape} beside x {x.shape}")
        if plane.dtype != x.dtype:
            raise TypeError(f"{name} is {plane.dtype}, x is {x.dtype}; cast it")
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        raise TypeError(f"x is {x.dtype}, expected bfloat16 or float32")
    check_sms("sms", sms)


def check_sms(name: str, sms: int | None) -> None:
    """Raises TypeError or ValueError for a budget of SMs that is none."""
    if sms is not None and not 1 <= check_integer(name, sms) <= 1024:
        raise ValueError(f"{name}={sms} is outside 1..1024; leave it out for XLA's own products")
