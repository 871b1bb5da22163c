"""The NNX module outside jit, and how a Domain is attached to it."""

import functools
import gc
import subprocess
import sys
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
from jax_iser.experts.formats import float8_block128 as fp8
from jax_iser.nnx import MoE, attach
from jax_iser.nnx import moe as moe_module

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
    moe_module._run.clear_cache()  # another test's module may have had these settings
    traces, router_logits = [], moe_module.router_logits

    def counted(*args):
        traces.append(args)
        return router_logits(*args)

    monkeypatch.setattr(moe_module, "router_logits", counted)
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
    moe = make_moe(mesh, method="portable", balance="none")
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
    model = nnx.List([make_moe(domain.mesh) for _ in range(2)])
    words = r"MoE 1 has layer=1, outside the Domain's num_layers=1; .* num_layers=2"
    refused(ValueError, words, attach, model, domain)
    model = nnx.List([make_moe(domain.mesh, layer=2) for _ in range(2)])
    words = r"MoE 1 has layer=2, and MoE 0 is number 2 too: .* give each MoE a layer= of its own"
    refused(ValueError, words, attach, model, domain)


def test_layers_are_numbered_in_the_order_of_the_model():
    mesh, x = make_mesh(2), inputs(48)
    layers = [None, None, 1, *[None] * 9]
    model = nnx.Sequential(*[make_moe(mesh, layer=layer) for layer in layers])
    with make_domain(mesh, num_layers=12) as own:
        for _ in range(2):  # again: numbers that attach gave do not count as given
            attach(model, own)
            found = [moe.attached_as for moe in model.layers]
            assert found == [0, 2, 1, *range(3, 12)]
        nnx.jit(lambda model, x: model(x))(model, x).block_until_ready()
        assert (own.busy(reset=True)[1].sum(1) == 96).all()
        attach(model.layers[5], own)
        assert model.layers[5].attached_as == 0
        attach(model, None)
        assert model.layers[5].attached_as is None
        nnx.jit(lambda moe, x: moe(x, domain=own.handle))(model.layers[2], x).block_until_ready()
        assert own.busy()[1].sum(1).tolist() == [0, 96, *[0] * 10]


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


# Stacked blocks


class Block(nnx.Module):
    def __init__(self, mesh, rngs):
        sizes = {"num_experts": 16, "top_k": 2, "num_shared_experts": 1, "routed_bias": True}
        self.moe = MoE(16, 24, **sizes, mesh=mesh, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(16))

    def __call__(self, x, **options):
        return x + self.moe(x * self.scale[...], **options)


def stack_blocks(mesh, num_layers=3):
    @nnx.split_rngs(splits=num_layers)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return Block(mesh, rngs)

    return make(nnx.Rngs(0))


def scan_blocks(axes):
    @nnx.jit
    def run(blocks, x):
        return nnx.scan(lambda block, x: block(x), in_axes=(axes, nnx.Carry), out_axes=nnx.Carry)(
            blocks, x
        )

    return run


WHOLE_EXPERTS = nnx.StateAxes({jax_iser.nnx.EXPERT_PLANES: None, ...: 0})


@nnx.jit
def loop_blocks(blocks, x):
    for layer in range(3):
        x = x + blocks.moe(x * blocks.scale[...][layer], layer=layer)
    return x


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_scans_over_stacked_blocks(kind):
    mesh, x = jax.make_mesh((4,), ("ep",), axis_types=(kind,), devices=jax.devices()[:4]), inputs()
    blocks = stack_blocks(mesh)
    with make_domain(mesh, num_layers=3) as own:
        attach(blocks, own)
        graph, state = nnx.split(blocks)
        expected, call = x, nnx.jit(lambda block, x: block(x))
        for layer in range(3):
            expected = call(
                nnx.merge(graph, jax.tree.map(lambda a, i=layer: a[i], state)), expected
            )
        expected.block_until_ready()
        for run in (scan_blocks(0), scan_blocks(WHOLE_EXPERTS), loop_blocks):
            own.busy(reset=True)
            assert_same_bits(run(blocks, x), expected)
            assert own.busy()[1].sum(1).tolist() == [192] * 3
        refused(ValueError, r"stacked over 3 layers: call it in nnx\.scan", blocks.moe, x)
        run = scan_blocks(WHOLE_EXPERTS)
        capture = nnx.jit(lambda m, x: nnx.capture(lambda m: run(m, x), nnx.Intermediate)(m))
        y, seen = capture(blocks, x)
        assert_same_bits(y, expected)
        assert seen["moe"]["router_logits"].get_value()[0].shape == (3, 96, 16)
        attach(blocks, None)
        refused(ValueError, r"needs a Domain", blocks.moe, x, layer=0)


def test_a_scan_over_whole_experts_copies_none():
    mesh, x = make_mesh(4), inputs()
    blocks = stack_blocks(mesh)
    with make_domain(mesh, num_layers=3) as own:
        attach(blocks, own)
        for axes, is_copying in ((0, True), (WHOLE_EXPERTS, False)):
            text = scan_blocks(axes).lower(blocks, x).compile().as_text()
            assert ("f32[1,4,24,16]" in text) == is_copying


def test_a_stack_behind_another_layer():
    mesh, x = make_mesh(4), inputs()
    model = nnx.Dict(a=make_moe(mesh), b=stack_blocks(mesh))
    words = r"MoE b\.moe has layer=3, outside the Domain's num_layers=3; .* num_layers=4"
    with make_domain(mesh, num_layers=3) as own:
        refused(ValueError, words, attach, model, own)
    with make_domain(mesh, num_layers=4) as own:
        attach(model, own)
        expected = scan_blocks(0)(model["b"], x).block_until_ready()
        for run in (scan_blocks(WHOLE_EXPERTS), loop_blocks):
            own.busy(reset=True)
            assert_same_bits(run(model["b"], x), expected)
            assert own.busy()[1].sum(1).tolist() == [0, 192, 192, 192]


# Meshes


def test_the_mesh_of_set_mesh_is_taken():
    mesh, x = make_mesh(4), inputs()
    with jax.set_mesh(mesh):
        moe, traced = make_moe(None), nnx.jit(lambda: make_moe(None))()
    assert (moe.mesh, moe.method) == (mesh, "fused")
    assert isinstance(traced.mesh, jax.sharding.AbstractMesh)
    for module in (moe, traced):
        assert module.gate.get_value().sharding.spec[0] == "ep"
    with make_domain(mesh) as own:
        attach(moe, own)
        attach(traced, own)
        assert_same_bits(nnx.jit(lambda moe, x: moe(x))(traced, x), moe(x))
    words = r"the mesh of jax\.set_mesh has axes \('dp',\), none named axis=\"ep\"; pass axis= with"
    with jax.set_mesh(make_mesh(4, names=("dp",))):
        refused(ValueError, words, make_moe, None)
        words = r"made for the mesh \{'ep': 4\}, and is called under jax\.set_mesh of \{'dp': 4\}"
        refused(ValueError, words, make_moe(mesh, method="portable"), x)
    assert make_moe(None).mesh is None


def test_modules_inside_shard_map_are_refused():
    mesh, x = make_mesh(4), inputs()
    moe = make_moe(mesh, method="portable")
    inside = jax.shard_map(moe, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    words = r"is called inside shard_map over \('ep',\), .* call jax_iser\.moe_layer there"
    refused(ValueError, words, inside, x)


@pytest.mark.parametrize("method", ["fused", "reference"])
def test_explicit_meshes(method):
    mesh, x = jax.make_mesh((8,), ("ep",)), inputs()
    assert mesh.axis_types == (AxisType.Explicit,)
    moe, auto = make_moe(mesh, method=method), make_moe(make_mesh(8), method=method)
    call = nnx.jit(lambda moe, x: moe(x))
    place = lambda x, *spec: jax.device_put(x, jax.NamedSharding(mesh, P(*spec)))  # noqa: E731
    with make_domain(mesh) as own:
        attach(moe, own)
        attach(auto, own)
        expected = call(auto, x)
        assert_same_bits(moe(x), expected)
        for given in (
            x,
            x.reshape(6, 16, 16),
            place(x, "ep"),
            place(x.reshape(8, 12, 16), "ep"),
            place(x.reshape(6, 16, 16), None, "ep"),
        ):
            y = call(moe, given)
            assert_same_bits(np.asarray(y).reshape(x.shape), expected)
            if isinstance(given, jax.Array):
                assert jax.typeof(y).sharding.spec == jax.typeof(given).sharding.spec
        with jax.set_mesh(mesh):
            adopted = make_moe(None, method=method)
            attach(adopted, own)
            assert_same_bits(call(adopted, x), expected)
            assert_same_bits(call(auto, x), expected)

            def loss(moe):
                return ((moe(x) - x) ** 2).mean()

            gradients = nnx.grad(loss)(moe)
        exact = nnx.grad(loss)(auto)
        for name in ("router", "down"):
            found = gradients[name].get_value()
            np.testing.assert_allclose(found, exact[name].get_value(), rtol=1e-5, atol=1e-7)


# Options, and what was restored


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
        refused(ValueError, "has layer=1, outside the Domain's num_layers=1", attach, pair, domain)
        moe, off = pair[0], make_moe(mesh, balance="none")
        attach(moe, domain)
        refused(ValueError, "pass weights_version=", moe, x)
        moe(x, weights_version=1)
        for module in (moe, off):
            module.gate[...] = 2 * module.gate[...]
        on = moe(x, weights_version=2)
        assert_same_bits(on, off(x, domain=domain.handle, weights_version=2))


def test_a_domain_on_other_axes_of_the_same_devices():
    auto = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=auto)
    moe = make_moe(mesh, axis="expert")
    words = (
        r"the Domain spans 8 devices, this MoE 4 of axis \"expert\" of the mesh \{'data': 2, "
        r"'expert': 4\}; make both with one mesh, without the other axes \{'data': 2\}"
    )
    with make_domain(make_mesh(8)) as own:
        refused(ValueError, words, attach, moe, own)
        refused(ValueError, words, moe, inputs(), domain=own.handle)
        call = nnx.jit(lambda moe, x, handle: moe(x, domain=handle))
        refused(ValueError, words, call, moe, inputs(), own.handle)


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
    moe = make_moe(domain.mesh, method="portable", dtype=jnp.bfloat16)
    attach(moe, domain)
    assert moe(inputs()).shape == (96, 16)


def test_no_tokens_in_groups_of_experts():
    moe = make_moe(None, num_groups=4, top_k_groups=2)
    assert moe(np.zeros((0, 16), np.float32)).shape == (0, 16)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"num_shared_experts": -1}, ValueError, "num_shared_experts=-1 is below 0"),
        ({"num_shared_experts": 1.0}, TypeError, r"num_shared_experts=1\.0 is not an integer"),
        (
            {"num_shared_experts": 0, "shared_intermediate_size": 8},
            ValueError,
            "shared_intermediate_size=8 is given, but num_shared_experts=0",
        ),
        (
            {"num_shared_experts": 0, "shared_expert_sms": 8},
            ValueError,
            "shared_expert_sms=8 is given, but num_shared_experts=0",
        ),
        ({"shared_intermediate_size": 0}, ValueError, "shared_intermediate_size=0 is below 1"),
        ({"shared_expert_sms": 2000}, ValueError, r"shared_expert_sms=2000 is outside 1\.\.1024"),
        ({"norm_topk_prob": "no"}, TypeError, "norm_topk_prob='no' is not True or False"),
        ({"routed_bias": 1}, TypeError, "routed_bias=1 is not True or False"),
        ({"layer": 1.5}, TypeError, r"layer=1\.5 is not an integer"),
        ({"layer": -1}, ValueError, "layer=-1 is below 0"),
        ({"reference_scheme": "blocks"}, ValueError, "reference_scheme='blocks' is not one of"),
        ({"mesh": 2, "reference_scheme": "dense"}, ValueError, "runs without a mesh only"),
        ({"routed_scaling_factor": "2"}, TypeError, "routed_scaling_factor='2' is not a number"),
        ({"dtype": "int8"}, TypeError, "dtype='int8' is not a floating-point dtype"),
        ({"param_dtype": "f99"}, TypeError, "param_dtype='f99' is not a floating-point dtype"),
        ({"mesh": "ep"}, TypeError, r"mesh is a str, expected a jax\.sharding\.Mesh or None"),
        ({"top_k": 2.0}, TypeError, r"top_k=2\.0 is not an integer"),
        ({"num_groups": 2.0, "top_k_groups": 1}, TypeError, r"num_groups=2\.0 is not an integer"),
    ],
)
def test_options_that_are_none(options, kind, words):
    mesh = options.get("mesh")
    mesh = make_mesh(mesh) if isinstance(mesh, int) else mesh
    refused(kind, words, make_moe, **options | {"mesh": mesh})


def test_sizes_that_are_none():
    sizes = {"num_experts": 4, "top_k": 2, "rngs": nnx.Rngs(0)}
    refused(ValueError, "intermediate_size=0 is below 1", MoE, 16, 0, **sizes)
    refused(TypeError, r"hidden_size=16\.0 is not an integer", MoE, 16.0, 8, **sizes)
    moe = make_moe(None)
    refused(TypeError, r"layer is 1\.5, expected one integer", moe, inputs(), layer=1.5)


@pytest.mark.parametrize("method", ["fused", "reference"])
def test_weights_of_other_sizes_are_refused(domain, method):
    moe = make_moe(domain.mesh, method=method)
    attach(moe, domain)
    for name in ("gate", "up", "down"):
        variable = getattr(moe, name)
        variable.set_value(variable.get_value()[:8])
    words = r"gate has shape \(8, 24, 16\), this MoE expects \(16, 24, 16\) \(num_experts=16"
    refused(ValueError, words, moe, inputs())
    moe.num_experts = 8  # as restored into a module of half the experts
    words = r"router has shape \(16, 16\), this MoE expects \(8, 16\) \(num_experts=8"
    refused(ValueError, words, moe, inputs())


def test_weights_of_other_experts_than_the_domain_has(domain):
    weights = jax_iser.ExpertWeights(*(jnp.ones(s) for s in [(2, 24, 16)] * 2 + [(2, 16, 24)]))
    call = jax.shard_map(
        functools.partial(jax_iser.moe_layer, method="portable", axis_name="ep"),
        mesh=domain.mesh,
        in_specs=(P("ep"), P("ep"), P("ep"), P(), P("ep")),
        out_specs=(P("ep"), jax_iser.Plan.specs("ep")),
    )
    ids, scales = jnp.zeros((96, 2), jnp.int32), jnp.ones((96, 2))
    words = "the weights are of 8 experts on 4 devices, the Domain was made for num_experts=16"
    refused(ValueError, words, call, inputs(), ids, scales, weights, domain.handle)


@pytest.mark.parametrize("balance", ["haloq", "none"])
@pytest.mark.parametrize("tokens", [64, 2048])  # a block, and many
def test_the_reference_passes_the_check_of_shard_map(balance, tokens):
    mesh = make_mesh(4)
    rng = np.random.default_rng(0)
    ids = (rng.integers(0, 64, (tokens, 2)) ** 2 % 64).astype(np.int32)
    shapes = [(tokens, 16), (64, 8, 16), (64, 8, 16)]
    x, gate, up = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    weights = jax_iser.ExpertWeights(gate, up, up.swapaxes(1, 2))
    options = {"method": "reference", "axis_name": "ep", "balance": balance}
    results = []
    for checks in ({}, {"check_vma": False}):
        layer = jax.shard_map(
            functools.partial(jax_iser.moe_layer, **options),
            mesh=mesh,
            in_specs=P("ep"),
            out_specs=(P("ep"), jax_iser.Plan.specs("ep")),
            **checks,
        )
        operands = (x, ids, np.ones(ids.shape, np.float32), weights)
        gradient = jax.grad(lambda *args, layer=layer: (layer(*args)[0] ** 2).sum(), argnums=3)
        results.append((jax.jit(layer)(*operands), jax.jit(gradient)(*operands)))
    assert (results[0][0][1].num_broadcasts > 0) == (balance == "haloq")
    for found, expected in zip(*map(jax.tree.leaves, results), strict=True):
        assert_same_bits(found, expected)


# Checkpoints, telemetry, names


def test_a_checkpoint_keeps_every_weight(tmp_path):
    sizes = {"num_experts": 4, "top_k": 2, "routed_bias": True, "num_shared_experts": 1}
    make = lambda seed: MoE(  # noqa: E731
        128, 128, **sizes, weight_dtype=fp8.NAME, mesh=mesh, rngs=nnx.Rngs(seed)
    )
    mesh = make_mesh(2)
    moe, other = make(0), make(1)
    limits = {"num_experts": 4, "hidden_size": 128, "intermediate_size": 128}
    with make_domain(mesh, weight_dtype=fp8.NAME, **limits) as own:
        attach(moe, own)
        state = nnx.state(moe, jax_iser.nnx.WEIGHTS)
        names = {"router", "routed_bias", "gate", "up", "down"}
        assert set(state) == names | {f"shared_{name}" for name in ("gate", "up", "down")}
        orbax = pytest.importorskip("orbax.checkpoint")
        with orbax.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "attached", state)
            checkpointer.wait_until_finished()
            template = nnx.state(other, jax_iser.nnx.WEIGHTS)  # never attached
            nnx.update(other, checkpointer.restore(tmp_path / "attached", template))
        for name in names:
            assert_same_bits(getattr(other, name).get_value(), getattr(moe, name).get_value(), name)
        refused(ValueError, "needs a Domain", other, np.ones((4, 128), np.float32))


def test_a_checkpoint_with_a_handle_says_how_to_save_without(tmp_path):
    orbax = pytest.importorskip("orbax.checkpoint")
    moe, plain = make_moe(make_mesh(2)), make_moe(make_mesh(2))
    with make_domain(moe.mesh, max_tokens_per_rank=48) as own:
        attach(moe, own)
        with orbax.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "all", nnx.state(moe))
            checkpointer.wait_until_finished()
            with pytest.raises(
                ValueError, match="not_a_weight__save_nnx_state_of_jax_iser_nnx_WEI"
            ):
                checkpointer.restore(tmp_path / "all", nnx.state(plain))
            # Into an attached one it goes; in another process calls refuse the words.
            nnx.update(moe, checkpointer.restore(tmp_path / "all", nnx.state(moe)))
        assert np.isfinite(np.asarray(moe(inputs()))).all()


def test_router_logits_have_gradients(domain):
    moe, x = make_moe(domain.mesh), inputs()
    attach(moe, domain)

    def loss(moe):
        _, seen = nnx.capture(moe, nnx.Intermediate)(x)
        logits = seen["router_logits"].get_value()[0]
        return (jax.nn.logsumexp(logits, axis=-1) ** 2).mean()

    gradients = nnx.jit(nnx.grad(loss))(moe)
    exact = jax.grad(lambda w: (jax.nn.logsumexp(x @ w.T, axis=-1) ** 2).mean())
    expected = exact(moe.router.get_value())
    np.testing.assert_allclose(gradients["router"].get_value(), expected, rtol=1e-4, atol=1e-6)
    assert np.abs(expected).max() > 0


NAMES = """
import sys, jax_iser
assert "flax" not in sys.modules
assert {"nnx", "models"} <= set(dir(jax_iser))
assert jax_iser.nnx.MoE and jax_iser.nnx is sys.modules["jax_iser.nnx"]
try:
    jax_iser.no_such_name
except AttributeError as error:
    print(error)
"""


def test_modules_are_found_as_attributes():
    done = subprocess.run(
        [sys.executable, "-c", NAMES], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout == "module 'jax_iser' has no attribute 'no_such_name'\n"
