"""The shared expert on the CPU, where a budget of SMs changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layers import assert_same_bits

import jax_iser
import jax_iser.nnx


def operands(dtype="float32", tokens=6, hidden=8, inner=12):
    rng = np.random.default_rng(0)
    shapes = ((tokens, hidden), (inner, hidden), (inner, hidden), (hidden, inner))
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_against_numpy(dtype):
    x, gate, up, down = operands(dtype)
    a, g, u, d = (np.asarray(v, np.float64) for v in (x, gate, up, down))
    h = a @ g.T / (1 + np.exp(-(a @ g.T))) * (a @ u.T)
    y = jax_iser.shared_expert(x, gate, up, down, sms=100)
    tolerance = {"float32": 1e-5, "bfloat16": 5e-2}[dtype]
    np.testing.assert_allclose(np.asarray(y, np.float64), h @ d.T, atol=tolerance, rtol=tolerance)
    assert y.dtype == x.dtype


def test_a_budget_changes_no_bit_and_no_gradient():
    def loss(sms, *args):
        return jnp.sum(jax_iser.shared_expert(*args, sms=sms) ** 2)

    found, expected = (
        jax.jit(jax.value_and_grad(lambda *a, s=sms: loss(s, *a), argnums=(0, 1, 2, 3)))(
            *operands()
        )
        for sms in (128, None)
    )
    jax.tree.map(assert_same_bits, found, expected)


def test_leading_axes():
    x, *planes = operands()
    y = jax_iser.shared_expert(x.reshape(2, 3, 8), *planes, sms=4)
    np.testing.assert_allclose(y.reshape(6, 8), jax_iser.shared_expert(x, *planes), rtol=1e-6)


def test_module_passes_its_budget_on():
    moes = [
        jax_iser.nnx.MoE(
            8,
            8,
            num_experts=4,
            top_k=2,
            num_shared_experts=1,
            shared_expert_sms=sms,
            rngs=nnx.Rngs(0),
        )
        for sms in (None, 100)
    ]
    x = jnp.ones((4, 8))
    assert_same_bits(moes[0](x), moes[1](x))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"sms": 0}, ValueError, r"sms=0 is outside 1\.\.1024"),
        ({"up": (11, 8)}, ValueError, r"up has shape \(11, 8\), expected \(12, 8\)"),
        ({"down": (12, 8)}, ValueError, r"down has shape \(12, 8\), expected \(8, 12\)"),
        ({"dtype": "float16"}, TypeError, "x is float16, expected bfloat16 or float32"),
        ({"gate_dtype": "bfloat16"}, TypeError, "gate is bfloat16, x is float32; cast it"),
    ],
)
def test_bad_operands(change, error, words):
    x, gate, up, down = operands(change.get("dtype", "float32"))
    gate = gate.astype(change.get("gate_dtype", gate.dtype))
    up = jnp.zeros(change.get("up", up.shape), up.dtype)
    down = jnp.zeros(change.get("down", down.shape), down.dtype)
    with pytest.raises(error, match=words):
        jax_iser.shared_expert(x, gate, up, down, sms=change.get("sms"))
