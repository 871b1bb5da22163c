"""The NNX module outside jit, and how a Domain is attached to it."""

import functools
import gc
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from layers import assert_same_bits

import jax_iser
import jax_iser.nnx
from jax_iser import fp8
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
    jax_iser.nnx._run.clear_cache()  # another test's module may have had these settings
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
    moe, twin = (make_moe(mesh, method=method) for _ in range(2))
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


# What a Domain is attached to


@pytest.fixture(scope="module")
def domain():
    with make_domain(make_mesh(4, devices=jax.devices()[:4])) as one:
        yield one


def refused(kind, text, call, *args, **options):
    with pytest.raises(kind, match=text):
        call(*args, **options)


def test_devices_are_compared(domain):
    x, devices = inputs(), jax.devices()
    for chosen in (devices[4:], devices[3::-1]):
        moe = make_moe(make_mesh(4, devices=chosen))
        names = r", ".join(f"cpu:{device.id}" for device in chosen)
        words = (
            rf"on devices \[cpu:0, .* cpu:3\], this MoE on \[{names}\]; .* with the mesh of the MoE"
        )
        refused(ValueError, words, attach, moe, domain)
        refused(ValueError, words, moe, x, domain=domain.handle)
    words = r"MoE inner\.moe on \[cpu:0, .*\]; .*'dp': 2.*one program drives one"
    group = make_moe(make_mesh(2, 4, names=("dp", "ep")))
    model = nnx.Dict(inner=nnx.Dict(moe=group))
    refused(ValueError, words, attach, model, domain)
    words = "spans 4 devices, this MoE has no mesh"
    refused(ValueError, words, attach, make_moe(None), domain)


def test_models_that_cannot_be_attached(domain):
    linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    words = r"a flax\.nnx\.\S*Linear, has no jax_iser\.nnx\.MoE: nothing to attach"
    refused(ValueError, words, attach, linear, domain)
    words = r"a flax\.linen\.\S*Dense, expected a flax\.nnx\.Module .* Flax Linen"
    refused(TypeError, words, attach, linen.Dense(3), domain)
    moe = make_moe(domain.mesh)
    refused(TypeError, r"domain is a str, expected a jax_iser\.Domain", attach, moe, "d")
    refused(TypeError, r"domain is a Domain, .* domain\.handle", moe, inputs(), domain=domain)
    attach([moe], domain)
    attach(moe, None)
    assert moe.domain is None


def test_a_closed_domain_is_not_attached():
    mesh = make_mesh(2)
    with make_domain(mesh, max_tokens_per_rank=48) as own:
        pass
    refused(ValueError, "this Domain is closed; make a new one", attach, make_moe(mesh), own)


@pytest.mark.parametrize("given", [lambda domain: domain, lambda domain: domain.handle])
def test_an_attached_domain_lives_until_it_is_closed(given):
    moe, domains = make_moe(make_mesh(2)), []

    def attach_one():
        domain = make_domain(moe.mesh, max_tokens_per_rank=48)
        domains.append(weakref.ref(domain))
        attach(moe, given(domain))

    attach_one()
    gc.collect()
    assert np.isfinite(np.asarray(moe(inputs()))).all()
    domains[0]().close()
    gc.collect()
    assert domains[0]() is None  # nothing else keeps it


def test_a_domain_that_was_remade_but_not_attached():
    moe, call = make_moe(make_mesh(2)), nnx.jit(lambda moe, x: moe(x))
    with make_domain(moe.mesh, max_tokens_per_rank=48) as own:
        attach(moe, own)
        call(moe, inputs())
    with make_domain(moe.mesh, max_tokens_per_rank=48):
        words = r"Domain \d+ is closed, .* attach the open Domain again \(jax_iser\.nnx\.attach"
        with pytest.raises(jax.errors.JaxRuntimeError, match=words):
            call(moe, inputs()).block_until_ready()


def test_layers_of_a_model_fit_the_domain(domain):
    model = nnx.List([make_moe(domain.mesh, layer=layer) for layer in (0, 3)])
    words = r"MoE 1 has layer=3, outside the Domain's num_layers=1; .* num_layers=4"
    refused(ValueError, words, attach, model, domain)
    assert model[0].domain is None  # all or none


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16])
def test_dtypes_of_module_and_domain(domain, dtype):
    moe = make_moe(domain.mesh, dtype=dtype)
    words = (
        r'computes in bfloat16 \(its dtype=\), the Domain was made for dtype="float32"; make the '
        r'Domain with dtype="bfloat16", or give the MoE dtype="float32"'
    )
    refused(TypeError, words, attach, moe, domain)
    refused(TypeError, words, moe, inputs(), domain=domain.handle)
    plain, wide = make_moe(domain.mesh), inputs().astype(jnp.bfloat16)
    words = r"bfloat16 \(of its input\), .* make the Domain with dtype"
    refused(TypeError, words, plain, wide, domain=domain.handle)
    words = r'float16 \(of its input\), .* made for dtype="float32"; give the MoE dtype="float32"'
    refused(TypeError, words, plain, wide.astype(np.float16), domain=domain.handle)
    with make_domain(domain.mesh, dtype=dtype) as own:
        attach(moe, own)
        assert moe(inputs()).dtype == np.float32


def test_stacked_modules_are_not_attached(domain):
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return MoE(16, 24, num_experts=16, top_k=2, mesh=domain.mesh, rngs=rngs)

    words = r"is stacked: its gate has shape \(3, 16, 24, 16\), .* nnx\.scan"
    refused(ValueError, words, attach, make(nnx.Rngs(0)), domain)


def test_inputs_that_do_not_fit(domain):
    moe = make_moe(domain.mesh)
    call = functools.partial(moe, domain=domain.handle)
    words = r"x has shape \(94, 16\): the number of tokens, 94, .* 4 ranks .* pad x to 96 tokens"
    refused(ValueError, words, call, inputs(94))
    refused(ValueError, r"\(16,\): the number of tokens, 1, .* to 4 tokens", call, inputs()[0])
    assert_same_bits(call(inputs().astype(np.float64)), call(inputs()))
    refused(ValueError, r"x has shape \(\), expected \[\.\.\., 16\]", call, jnp.float32(3))
    with make_domain(make_mesh(2), ranks_per_device=2) as own:
        moe = make_moe(own.mesh)
        words = r"94, .* by the 4 ranks .* \(2 devices, ranks_per_device=2\); pad x to 96"
        refused(ValueError, words, moe, inputs(94), domain=own.handle)
        # What the error says: added rows change no other.
        padded = np.concatenate([inputs(94), np.ones((2, 16), np.float32)])
        whole = moe(inputs(), domain=own.handle)
        assert_same_bits(moe(padded, domain=own.handle)[:94], whole[:94])


def test_weights_of_fp8_modules_are_assigned_quantised():
    moe = MoE(128, 128, num_experts=2, top_k=1, weight_dtype=jnp.float8_e4m3fn, rngs=nnx.Rngs(0))
    assert moe.weight_dtype == fp8.NAME
    values = jnp.ones((2, 128, 128))
    words = r"weights of float32 are assigned .*quantize_fp8 .*load_hf"
    refused(TypeError, words, moe.gate.__setitem__, ..., values)
    refused(TypeError, words, moe.gate.set_value, values)
    moe.gate[...] = fp8.quantize_plane(values)
    assert_same_bits(moe.gate[...], fp8.quantize_plane(values))


# Replicas that stay, and handles that go


def test_resident_domains_are_told_of_other_weights():
    mesh, x = make_mesh(4), np.ones((96, 16), np.float32)
    pair = nnx.List([make_moe(mesh, method="fused") for _ in range(2)])
    with make_domain(mesh, bank="per_layer", resident=True) as domain:
        refused(ValueError, r"modules share one: layers \[0, 0\]", attach, pair, domain)
        moe, off = pair[0], make_moe(mesh, balance="none")
        attach(moe, domain)
        refused(ValueError, "pass weights_version=", moe, x)
        moe(x, weights_version=1)
        for module in (moe, off):
            module.gate[...] = 2 * module.gate[...]
        on = moe(x, weights_version=2)
        assert_same_bits(on, off(x, domain=domain.handle, weights_version=2))


class Two(nnx.Module):
    def __init__(self, mesh):
        self.first, self.second = make_moe(mesh), make_moe(mesh, layer=1)

    def __call__(self, x):
        return self.second(self.first(x))


def test_a_model_may_be_donated(domain):
    mesh, x = domain.mesh, inputs()
    model = Two(mesh)

    def step(model, x):
        gradients = nnx.grad(lambda m: (m(x) ** 2).mean())(model)
        nnx.update(
            model, jax.tree.map(lambda w, g: w - 1e-3 * g, nnx.state(model, nnx.Param), gradients)
        )

    with make_domain(mesh, num_layers=2) as own:
        attach(model, own)
        step = nnx.jit(step, donate_argnums=0)
        for _ in range(2):
            step(model, x)
        assert not own.handle.words.is_deleted()
        assert np.isfinite(np.asarray(model(x))).all()
        gone = jax_iser.DomainHandle(jnp.copy(own.handle.words), own.config)
        gone.words.delete()
        refused(ValueError, "was donated", attach, model, gone)


@pytest.mark.parametrize("kind", [jnp.float32, np.array], ids=["jax", "numpy"])
def test_the_scaling_factor_may_be_an_array(domain, kind):
    x, results = inputs(), []
    for scale in (2.5, kind(2.5)):
        moe = make_moe(domain.mesh, routed_scaling_factor=scale)
        attach(moe, domain)
        results.append(moe(x))
    assert_same_bits(results[1], results[0])
    traced = jax.jit(lambda s: make_moe(None, routed_scaling_factor=s)(x))
    np.testing.assert_allclose(
        traced(2.5), make_moe(None, routed_scaling_factor=2.5)(x), rtol=1e-5, atol=1e-6
    )


def test_a_reference_module_computes_in_its_own_dtype(domain):
    moe = make_moe(domain.mesh, method="reference", dtype=jnp.bfloat16)
    attach(moe, domain)
    assert moe(inputs()).shape == (96, 16)


def test_no_tokens_in_groups_of_experts():
    moe = make_moe(None, num_groups=4, top_k_groups=2)
    assert moe(np.zeros((0, 16), np.float32)).shape == (0, 16)
