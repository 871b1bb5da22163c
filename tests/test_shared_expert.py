"""The shared expert on the CPU, where a budget of SMs changes nothing; and lowered for GPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layers import assert_same_bits

import jax_iser
import jax_iser.nnx
from jax_iser import _extension
from jax_iser.domain.cuda import runtime


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


class Extension:
    """What tracing asks of the CUDA extension, where there is none."""

    def shared_expert_bytes(self, tokens, inner, is_bf16):
        return 1000 * tokens + inner + is_bf16


@pytest.fixture
def extension(monkeypatch):
    """Budgets count from here on, and programs can be lowered for GPUs."""
    monkeypatch.setattr(_extension, "iser_cuda", Extension())
    monkeypatch.setattr(runtime, "open_cublas", lambda: None)


def lowered_for_gpus(function, *args):
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_budget_is_an_attribute_of_the_call_on_gpus(extension, dtype):
    def shared(*args):
        return jax_iser.shared_expert(*args, sms=100)

    text = lowered_for_gpus(shared, *operands(dtype))
    assert text.count("@jax_iser.shared_expert(") == 1
    assert "num_sms = 100 : i64" in text
    scratch = 1000 * 6 + 12 + (dtype == "bfloat16")
    assert f"tensor<{scratch}xui8>" in text
    assert "dot_general" not in text


def test_without_a_budget_or_the_extension_xla_multiplies(extension, monkeypatch):
    def products(sms):
        text = lowered_for_gpus(lambda *a: jax_iser.shared_expert(*a, sms=sms), *operands())
        assert "@jax_iser.shared_expert(" not in text
        return text.count("dot_general")

    assert products(None) == 3
    monkeypatch.setattr(_extension, "iser_cuda", None)
    assert products(100) == 3


def test_a_budget_changes_no_bit_and_no_gradient_on_cpus(extension):
    """On a CPU the branch for GPUs is there and not taken; its gradient is a rule of ours."""

    def loss(sms, *args):
        return jnp.sum(jax_iser.shared_expert(*args, sms=sms) ** 2)

    def value_and_grad(sms):
        return jax.value_and_grad(lambda *a: loss(sms, *a), argnums=(0, 1, 2, 3))

    assert "custom_vjp" in str(jax.make_jaxpr(lambda *a: loss(128, *a))(*operands()))
    assert "custom_vjp" not in str(jax.make_jaxpr(lambda *a: loss(None, *a))(*operands()))
    found, expected = (jax.jit(value_and_grad(sms))(*operands()) for sms in (128, None))
    assert all(np.abs(leaf).max() > 1e-2 for leaf in jax.tree.leaves(expected))
    jax.tree.map(assert_same_bits, found, expected)


def test_leading_axes():
    x, *planes = operands()
    y = jax_iser.shared_expert(x.reshape(2, 3, 8), *planes, sms=4)
    np.testing.assert_allclose(y.reshape(6, 8), jax_iser.shared_expert(x, *planes), rtol=1e-6)


@pytest.mark.parametrize("sms", [None, 100])
def test_module_passes_its_budget_on(extension, sms):
    moe = jax_iser.nnx.MoE(
        8,
        8,
        num_experts=4,
        top_k=2,
        num_shared_experts=1,
        shared_expert_sms=sms,
        rngs=nnx.Rngs(0),
    )
    text = lowered_for_gpus(lambda x: moe(x), jnp.ones((4, 8)))
    assert ("num_sms = 100 : i64" in text) == (sms == 100)
    assert text.count("@jax_iser.shared_expert(") == (sms == 100)


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
