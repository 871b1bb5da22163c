"""The NNX module outside jit, and how a Domain is attached to it."""

import time

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from layers import assert_same_bits

import jax_iser
import jax_iser.nnx
from jax_iser.nnx import MoE, attach

SIZES = {"num_experts": 16, "top_k": 2, "hidden_size": 16, "intermediate_size": 24}


def make_mesh(*shape, names=("ep", "tp"), devices=None):
    auto = (AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, names[: len(shape)], axis_types=auto, devices=devices)


def make_moe(mesh, **options):
    sizes = {"num_experts": 16, "top_k": 2, "num_shared_experts": 1}
    return MoE(16, 24, **sizes | options, mesh=mesh, rngs=nnx.Rngs(0))


def make_domain(mesh, **options):
    limits = {"timeout_s": 60.0, "startup_timeout_s": 60.0}
    return jax_iser.Domain(mesh, "ep", **SIZES | {"max_tokens_per_rank": 24} | limits | options)


def inputs(tokens=96):
    return np.random.default_rng(0).standard_normal((tokens, 16)).astype(np.float32)


def count_traces(monkeypatch):
    """A list that grows by one whenever the layer's body is traced, or runs op by op."""
    traces, router_logits = [], jax_iser.nnx.router_logits

    def counted(*args):
        traces.append(args)
        return router_logits(*args)

    monkeypatch.setattr(jax_iser.nnx, "router_logits", counted)
    return traces


# Outside jit


@pytest.mark.parametrize("method", ["fused", "reference"])
def test_calls_outside_jit_run_one_program(monkeypatch, method):
    traces = count_traces(monkeypatch)
    mesh, x = make_mesh(4), inputs()
    moe, twin = (make_moe(mesh, method=method, routed_scaling_factor=1.25) for _ in range(2))
    call = nnx.jit(lambda moe, x: moe(x))
    with make_domain(mesh) as domain:
        attach(moe, domain)
        attach(twin, domain)
        expected = call(moe, x)
        assert_same_bits(moe(x), expected)
        seen = len(traces)
        assert seen > 0
        assert_same_bits(moe(x), expected)
        assert_same_bits(twin(x), expected)
        assert len(traces) == seen
        eager, jitted = least_seconds(lambda: moe(x)), least_seconds(lambda: call(moe, x))
        # Op by op it takes a second or more; the rest is what two busy cores may add.
        assert eager < jitted + 0.1
        moe.balance = "none"
        assert_same_bits(moe(x), expected)
        assert len(traces) > seen


def least_seconds(call):
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        call().block_until_ready()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


@pytest.mark.parametrize("shape", [(4, 1), (4, 2)])
def test_meshes_of_two_axes_outside_jit(shape):
    mesh, x = make_mesh(*shape), inputs()
    moe = make_moe(mesh, method="reference", balance="none")
    expected = make_moe(None, balance="none")(x)
    # XLA's reductions over other per-device shapes differ in the last bits.
    np.testing.assert_allclose(moe(x), expected, atol=1e-5)
    gradients = nnx.grad(lambda moe: (moe(x) ** 2).sum())(moe)
    assert np.abs(gradients["down"].get_value()).max() > 0


def test_a_domain_on_a_mesh_of_two_axes():
    mesh, x = make_mesh(4, 1), inputs()
    moe, plain = make_moe(mesh), make_moe(make_mesh(4))
    with make_domain(mesh) as domain:
        attach(moe, domain)
        y = moe(x)
    with make_domain(plain.mesh) as domain:
        attach(plain, domain)
        assert_same_bits(y, plain(x))


def test_specs_of_a_plan():
    specs = jax_iser.Plan.specs("ep")
    assert specs.route_slot == P("ep")
    assert set(specs) - {specs.route_slot} == {P()}
