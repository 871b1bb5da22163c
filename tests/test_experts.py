"""What an expert is: its planes in Python and in core, formats, activations, biases, the layer."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import (
    OFF,
    activation_f64,
    apply_layer,
    assert_close_fp8,
    assert_replicas,
    assert_same_bits,
    dense_numpy,
    make_domain,
    make_fp8_problem,
    make_problem,
    reference_numpy,
    run_layer,
)

import jax_iser
from jax_iser import Activation, DomainConfig, ExpertWeights, _iser, limits
from jax_iser.domain.options import shape_of
from jax_iser.experts.activation import KINDS
from jax_iser.experts.bundle import PLANES, bundle_layout
from jax_iser.experts.formats import FORMATS, TOKEN_FORMATS, format_of
from jax_iser.methods.portable.fused_moe import fused_moe

ACTIVATIONS = [Activation("silu"), Activation("gelu_tanh"), Activation("clamped_swiglu", limit=0.5)]
named = functools.partial(pytest.mark.parametrize, ids=lambda a: getattr(a, "kind", str(a)))

# Planes.

SIZES = {"num_ranks": 2, "num_experts": 4, "top_k": 2, "max_tokens_per_rank": 3}
TYPES = ("float32", "bfloat16", "uint8")  # in the order of PlaneType of ffi/core/bundle.h


@st.composite
def configs(draw):
    name = draw(st.sampled_from(sorted(FORMATS)))
    step = 64 if name == "float8_block128" else 1
    size = st.integers(1, 6000 // step).map(lambda n: n * step)
    return DomainConfig(
        **SIZES,
        hidden_size=draw(size),
        intermediate_size=draw(size),
        dtype=name if name in TYPES else draw(st.sampled_from(TYPES[:2])),
        weight_format=name,
        expert_biases=draw(st.booleans()),
    )


@given(config=configs())
def test_python_and_core_describe_the_same_planes(config):
    shape = shape_of(config, is_multi_process=False)
    found = [
        (
            *(plane.shape if len(plane.shape) == 2 else (1, *plane.shape)),
            plane.element_bits,
            plane.scale_block,
            plane.offset,
            plane.num_bytes,
            plane.scales_offset,
            TYPES.index(plane.array_dtype),
            len(plane.array_shape),
        )
        for plane in config.bundle.planes
    ]
    assert found == shape.planes()
    assert [plane.name for plane in config.bundle.planes] == list(PLANES[: len(found)])
    assert config.bundle_bytes == config.bundle.num_bytes == shape.bundle_bytes()
    for plane in config.bundle.planes:
        itemsize = np.dtype(plane.array_dtype).itemsize
        assert plane.num_bytes == np.prod(plane.array_shape) * itemsize


def test_planes_by_hand():
    """gpt-oss's sizes: the last blocks of 2880 have 64 rows and columns."""
    layout = bundle_layout(FORMATS["float8_block128"], 2880, 2880, has_biases=True)
    plane = 2880 * 2880 + 4 * 23 * 23
    assert [each.num_bytes for each in layout.planes] == [-(-plane // 128) * 128] * 3 + [11520] * 3
    assert layout.planes[0].scales_offset == 2880 * 2880
    assert layout.num_bytes == sum(each.num_bytes for each in layout.planes)
    small = bundle_layout(FORMATS["bfloat16"], 3, 5, has_biases=True)
    assert [each.offset for each in small.planes] == [0, 128, 256, 384, 512, 640]


def test_limits_are_those_of_core():
    ours = {name: value for name, value in vars(limits).items() if name.startswith("MAX_")}
    assert ours == _iser.LIMITS


@given(step=st.integers(1, 100), hidden=st.integers(1, 100))
def test_sizes_of_fp8_planes_are_found_again(step, hidden):
    layout = bundle_layout(FORMATS["float8_block128"], 64 * hidden, 64 * step)
    gate = jax.ShapeDtypeStruct((1, layout.planes[0].num_bytes), jnp.uint8)
    assert FORMATS["float8_block128"].intermediate_of(gate, 64 * hidden) == 64 * step


# Formats.


def test_formats_are_in_the_order_of_core():
    assert [each.index for each in FORMATS.values()] == list(range(len(FORMATS)))
    assert {each.token_format for each in FORMATS.values()} == set(TOKEN_FORMATS)


def test_aliases_make_equal_configurations():
    sizes = SIZES | {"hidden_size": 128, "intermediate_size": 64}
    named = DomainConfig(**sizes, weight_format="float8_block128")
    alias = DomainConfig(**sizes, weight_dtype=jnp.float8_e4m3fn)
    assert named == alias
    assert named.digest == alias.digest
    assert (alias.weight_format, alias.token_format) == ("float8_block128", "float8_row128")
    assert named.weight_dtype == "float8_e4m3fn"
    plain = DomainConfig(**sizes, dtype="bfloat16")
    assert plain == DomainConfig(**sizes, dtype="bfloat16", weight_format="bfloat16")
    assert (plain.weight_format, plain.token_format, plain.weight_dtype) == (
        "bfloat16",
        "bfloat16",
        None,
    )
    by_name = DomainConfig(**sizes, activation="gelu_tanh")
    assert by_name == DomainConfig(**sizes, activation=Activation("gelu_tanh"))
    digests = {
        DomainConfig(**sizes, **change).digest
        for change in (
            {},
            {"dtype": "bfloat16"},
            {"weight_format": "float8_block128"},
            {"activation": "gelu_tanh"},
            {"activation": "clamped_swiglu"},
            {"activation": Activation("clamped_swiglu", limit=6.0)},
            {"expert_biases": True},
        )
    }
    assert len(digests) == 7


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"weight_format": "mxfp5"}, ValueError, "weight_format='mxfp5' is not one of float32,"),
        (
            {"weight_format": "bfloat16"},
            ValueError,
            'weight_format="bfloat16" with dtype="float32": .* leave weight_format out',
        ),
        (
            {"weight_format": "float32", "weight_dtype": "float8_e4m3fn"},
            ValueError,
            'weight_format="float8_block128", contradict each other',
        ),
        (
            {"token_format": "float8_row128"},
            ValueError,
            "token_format='float8_row128' does not go with weight_format='float32'",
        ),
        ({"activation": "relu"}, ValueError, "activation='relu' is not one of silu,"),
        ({"expert_biases": "yes"}, TypeError, "expert_biases='yes' is not True or False"),
    ],
)
def test_configurations_that_contradict_themselves(options, error, text):
    with pytest.raises(error, match=text):
        DomainConfig(**SIZES, hidden_size=128, intermediate_size=64, **options)


# Activations.


def test_activations_are_in_the_order_of_core():
    assert [Activation(kind).index for kind in KINDS] == [0, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"kind": "relu"}, ValueError, "activation='relu' is not one of silu, gelu_tanh"),
        ({"limit": 7.0}, ValueError, "activation 'silu' takes no limit=7.0"),
        ({"kind": "clamped_swiglu", "limit": -1}, ValueError, "limit=-1.0 .* not above 0"),
        ({"kind": "clamped_swiglu", "alpha": float("nan")}, TypeError, "alpha=nan"),
        ({"kind": "clamped_swiglu", "offset": "1"}, TypeError, "offset='1'"),
    ],
)
def test_activations_that_are_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        Activation(**arguments)


@named("activation", ACTIVATIONS)
def test_activations_against_f64(activation):
    rng = np.random.default_rng(0)
    gate, up = rng.standard_normal((2, 4000)) * 4
    expected = activation_f64(activation, gate, up)
    gate, up = gate.astype(np.float32), up.astype(np.float32)
    for found in (activation(gate, up, np), activation(jnp.asarray(gate), jnp.asarray(up))):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)


def test_clamps_hold_and_keep_nan():
    swiglu = Activation("clamped_swiglu", limit=2.0, alpha=1.0, offset=0.0)
    sigmoid = 1 / (1 + np.exp(-2.0))
    for module in (np, jnp):
        gate = module.asarray([9.0, 9.0, -9.0, np.nan, 1.0])
        up = module.asarray([9.0, -9.0, 9.0, 1.0, np.nan])
        found = np.asarray(swiglu(gate, up, module))
        np.testing.assert_allclose(found[:2], [4 * sigmoid, -4 * sigmoid], rtol=1e-6)
        np.testing.assert_allclose(found[2], -18 / (1 + np.exp(9.0)), rtol=1e-5)
        assert np.isnan(found[3:]).all()


@named("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shared_expert(activation, dtype):
    rng = np.random.default_rng(1)
    x, gate, up, down = (
        jnp.asarray(rng.standard_normal(shape), dtype)
        for shape in ((6, 8), (12, 8), (12, 8), (8, 12))
    )
    a, g, u, d = (np.asarray(v, np.float64) for v in (x, gate, up, down))
    expected = activation_f64(activation, a @ g.T, a @ u.T) @ d.T
    name = activation.kind if activation.kind == "silu" else activation
    y = jax_iser.shared_expert(x, gate, up, down, sms=7, activation=name)
    tolerance = {"float32": 1e-5, "bfloat16": 5e-2}[dtype]
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, atol=tolerance, rtol=tolerance)


# The layer.

CASES = [
    *itertools.product(("float32", "bfloat16"), ACTIVATIONS, (False, True)),
    *(("float8_block128", activation, True) for activation in ACTIVATIONS),
]


def problem_of(weight_format, activation, has_biases, **sizes):
    options = {"activation": activation, "has_biases": has_biases} | sizes
    if weight_format == "float8_block128":
        # Neither is a multiple of 128: the last block of each row is half a block.
        return make_fp8_problem("W2", hidden=192, intermediate=320, **options)
    return make_problem("W2", hidden=33, intermediate=47, dtype=weight_format, **options)


def tolerance_of(problem):
    # f32: the order of sums. bf16: h and each expert's output are rounded to 8 bits.
    return {"float32": 2e-5, "bfloat16": 4e-2}[str(problem.x.dtype)]


@named(("weight_format", "activation", "has_biases"), CASES)
def test_replicas_change_no_bit(weight_format, activation, has_biases):
    problem = problem_of(weight_format, activation, has_biases)
    with make_domain(problem, ranks_per_device=4) as domain:
        y, plan = run_layer(problem, domain=domain)
        assert assert_replicas(domain, problem, plan) > 0
        off, _ = run_layer(problem, domain=domain, options=OFF)
    assert_same_bits(y, off)
    if weight_format == "float8_block128":
        assert_close_fp8(y, reference_numpy(problem), problem)
        return
    scale = np.abs(dense_numpy(problem)).max()
    for expected in (dense_numpy(problem), reference_numpy(problem)):
        off_by = np.abs(y.astype(np.float64) - expected).max() / scale
        assert off_by <= tolerance_of(problem)


def test_each_part_of_an_expert_shows():
    """Whatever is left out or exchanged changes the output: biases of each plane, activations."""
    problem = problem_of("float32", ACTIVATIONS[2], True)
    y = dense_numpy(problem)
    weights = problem.weights
    changes = [
        {"activation": "silu"},
        {"activation": "gelu_tanh"},
        {"activation": Activation("clamped_swiglu", limit=0.6)},
        {"activation": Activation("clamped_swiglu", limit=0.5, alpha=1.0)},
        {"activation": Activation("clamped_swiglu", limit=0.5, offset=0.5)},
        *(
            {"weights": weights._replace(**{name: np.zeros_like(getattr(weights, name))})}
            for name in PLANES
        ),
        {
            "weights": weights._replace(
                gate_bias=weights.up_bias,
                up_bias=weights.gate_bias,
            )
        },
    ]
    with make_domain(problem, ranks_per_device=4) as domain:
        found, _ = run_layer(problem, domain=domain)
    np.testing.assert_allclose(found, y, atol=2e-5 * np.abs(y).max())
    for change in changes:
        other = dense_numpy(dataclasses.replace(problem, **change))
        assert np.abs(other - y).max() > 1e-2 * np.abs(y).max(), change


@settings(max_examples=12)
@given(data=st.data())
def test_any_sizes(data):
    """Against f64, ON equal to OFF, whatever the sizes."""
    weight_format = data.draw(st.sampled_from(sorted(FORMATS)))
    step = 64 if weight_format == "float8_block128" else 1
    hidden, intermediate = (data.draw(st.integers(1, 200 // step)) * step for _ in range(2))
    sizes = {"hidden": hidden, "intermediate": intermediate, "num_ranks": 4, "num_experts": 8}
    options = {"activation": data.draw(st.sampled_from(ACTIVATIONS)), "tokens": 9}
    options |= {"has_biases": data.draw(st.booleans()), "seed": data.draw(st.integers(0, 99))}
    if weight_format == "float8_block128":
        problem = make_fp8_problem(**sizes, **options, top_k=2)
    else:
        problem = make_problem(**sizes, **options, dtype=weight_format)
    with make_domain(problem, ranks_per_device=4, min_group_size=1) as domain:
        y, plan = run_layer(problem, domain=domain)
        assert_replicas(domain, problem, plan)
        off, _ = run_layer(problem, domain=domain, options=OFF)
    assert_same_bits(y, off)
    if weight_format == "float8_block128":
        assert_close_fp8(y, reference_numpy(problem), problem, most_flipped=0.2)
        return
    expected = dense_numpy(problem)
    off_by = np.abs(y.astype(np.float64) - expected).max() / np.abs(expected).max()
    assert off_by <= tolerance_of(problem)


def test_stacked_biases():
    problem = problem_of("float32", ACTIVATIONS[2], True, num_layers=3)
    assert problem.is_stacked
    with make_domain(problem, ranks_per_device=4, num_layers=3) as domain:
        for layer in range(3):
            y, plan = run_layer(problem, domain=domain, options={"layer": layer})
            assert assert_replicas(domain, problem, plan, layer, weights_layer=layer) > 0
            expected = dense_numpy(problem, layer)
            np.testing.assert_allclose(y, expected, atol=2e-5 * np.abs(expected).max())


@named("activation", ACTIVATIONS)
@pytest.mark.parametrize("method", ["fused", "reference"])
def test_gradients_reach_biases(activation, method):
    """Against autodiff of a dense layer that nobody here wrote for it."""
    problem = problem_of("float32", activation, True)
    factors = np.random.default_rng(2).standard_normal(problem.x.shape).astype(np.float32)

    def dense(x, weights, topk_weights):
        gate, up, down, gate_bias, up_bias, down_bias = weights
        one_hot = jax.nn.one_hot(problem.topk_ids, problem.num_experts) * topk_weights[..., None]
        gated = jnp.einsum("td,eid->tei", x, gate) + gate_bias
        h = activation(gated, jnp.einsum("td,eid->tei", x, up) + up_bias)
        outputs = jnp.einsum("tei,edi->ted", h, down) + down_bias
        return (jnp.einsum("te,ted->td", one_hot.sum(1), outputs) * factors).sum()

    with make_domain(problem, ranks_per_device=4) as domain:

        def layer(x, weights, topk_weights):
            args = (x, problem.topk_ids, topk_weights, weights, domain.handle)
            return (apply_layer(domain.mesh, *args, method=method)[0] * factors).sum()

        operands = (problem.x, problem.weights, problem.topk_weights)
        found = jax.jit(jax.grad(layer, (0, 1, 2)))(*operands)
    expected = jax.jit(jax.grad(dense, (0, 1, 2)))(*operands)
    leaves = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for one, another in leaves:
        assert np.abs(another).max() > 0
        np.testing.assert_allclose(one, another, atol=2e-5 * np.abs(another).max())


def test_gradients_of_fp8_reach_biases_alone():
    problem = problem_of("float8_block128", ACTIVATIONS[2], True)
    planes = [
        jax_iser.dequantize_fp8(plane, *layout.shape)
        for plane, layout in zip(problem.weights[:3], problem.layout.planes, strict=False)
    ]
    operands = (jnp.asarray(problem.x), jnp.asarray(problem.topk_ids))

    def total(biases, planes, weight_format):
        y = fused_moe(
            *operands,
            jnp.asarray(problem.topk_weights),
            *planes,
            *biases,
            weight_format=weight_format,
            activation=problem.activation,
        )
        return y.sum()

    found = jax.grad(total)(problem.weights.biases, problem.weights[:3], "float8_block128")
    expected = jax.grad(total)(problem.weights.biases, planes, "float32")
    for one, another in zip(found, expected, strict=True):
        assert np.abs(another).max() > 0
        np.testing.assert_allclose(one, another, atol=1e-5 * np.abs(another).max(), rtol=1e-5)


@pytest.mark.parametrize("scheme", ["blocked", "dense"])
@named("activation", ACTIVATIONS)
def test_schemes_of_the_reference(scheme, activation):
    problem = problem_of("float32", activation, True)
    args = [jnp.asarray(a) for a in (*problem.operands[:3], *problem.weights.planes)]
    y = fused_moe(*args, scheme=scheme, activation=activation)
    expected = dense_numpy(problem)
    np.testing.assert_allclose(y, expected, atol=2e-5 * np.abs(expected).max())


def test_method_reference_without_a_domain():
    problem = problem_of("float8_block128", ACTIVATIONS[2], True)
    args = (*(jnp.asarray(a) for a in problem.operands[:3]), problem.weights)
    options = {"weight_format": "float8_block128", "activation": ACTIVATIONS[2]}
    y, _ = jax_iser.moe_layer(*args, method="portable", balance="none", **options)
    assert_close_fp8(y, reference_numpy(problem), problem)
    with pytest.raises(
        TypeError, match=r'gate has dtype uint8, .* weight_format="float8_block128"'
    ):
        jax_iser.moe_layer(*args, method="portable", balance="none")


# Operands that do not fit.


def test_biases_that_do_not_fit():
    problem = problem_of("float32", "silu", True)
    plain = dataclasses.replace(problem, weights=ExpertWeights(*problem.weights[:3]))
    some = problem.weights._replace(up_bias=None)
    short = problem.weights._replace(down_bias=problem.weights.up_bias)
    half = problem.weights._replace(gate_bias=problem.weights.gate_bias.astype(np.float16))
    wide = problem.weights._replace(gate_bias=problem.weights.gate_bias[..., None, None])
    with make_domain(problem) as domain, make_domain(plain) as other:
        cases = [
            (domain, plain.weights, ValueError, "no biases, .* made with expert_biases=True"),
            (other, problem.weights, ValueError, "have biases, .* made with expert_biases=False"),
            (domain, some, ValueError, "up_bias of the experts is None beside other biases"),
            (domain, short, ValueError, r"down_bias has shape \(2, 47\), .* \(2, 33\)"),
            (domain, half, TypeError, "gate_bias is float16, the Domain expects float32; cast it"),
            (domain, wide, ValueError, r"gate_bias has shape \(2, 47, 1, 1\), .* \(2, 47\)"),
        ]
        for place, weights, kind, text in cases:
            args = (*problem.operands[:3], weights, place.handle)
            with pytest.raises(kind, match=text):
                jax.eval_shape(functools.partial(apply_layer, place.mesh), *args)


def test_a_call_that_names_another_expert_than_the_domain():
    problem = problem_of("float32", "gelu_tanh", False)
    with make_domain(problem) as domain:
        call = functools.partial(apply_layer, domain.mesh)
        args = (*problem.operands, domain.handle)
        for method in ("fused", "reference"):
            other = functools.partial(call, method=method, activation="silu")
            with pytest.raises(ValueError, match=r"activation=.*silu.*but the Domain was made"):
                jax.eval_shape(other, *args)
            other = functools.partial(call, method=method, weight_format="bfloat16")
            with pytest.raises(ValueError, match="weight_format='bfloat16', but the Domain"):
                jax.eval_shape(other, *args)
        jax.eval_shape(functools.partial(call, activation="gelu_tanh"), *args)


def test_place_knows_biases_and_stacks():
    problem = problem_of("float32", "silu", True, num_layers=2)
    with make_domain(problem, num_layers=2) as domain:
        placed = domain.place(problem.weights)
        assert placed.gate_bias.sharding.spec == jax.sharding.PartitionSpec(None, "ep")
        for one, plane in zip(placed.planes, problem.weights.planes, strict=True):
            assert_same_bits(one, plane)
        y, _ = jax.jit(functools.partial(apply_layer, domain.mesh, layer=1))(
            *problem.operands[:3], placed, domain.handle
        )
        bare = domain.place({"gate": problem.weights.gate})["gate"]
        assert bare.sharding.spec == jax.sharding.PartitionSpec(None, "ep")
    expected = dense_numpy(problem, 1)
    np.testing.assert_allclose(y, expected, atol=2e-5 * np.abs(expected).max())


def test_format_of_names_the_remedy():
    with pytest.raises(
        ValueError, match=r"weight_dtype='int3' is neither None, .* 'float8_e4m3fn'"
    ):
        format_of(None, "float32", "int3")
