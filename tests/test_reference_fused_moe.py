"""The JAX reference of the routed experts against NumPy, dense einsum and `lax.ragged_dot`."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_iser.methods.portable.fused_moe import SCHEMES, fused_moe
from jax_iser.methods.portable.layer import moe_layer
from jax_iser.plan import plan_counts
from jax_iser.reference import planner
from jax_iser.reference.fused_moe import fused_moe_numpy

# h and each expert's output are rounded to bf16 once each; a route's product then differs by an
# ulp where the f32 sums before the rounding do. In f32 only the order of sums differs.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


def make_operands(tokens=48, hidden=24, intermediate=40, experts=16, top_k=3, dtype="float32"):
    rng = np.random.default_rng(tokens + experts)
    cast = lambda a: jnp.asarray(a, dtype)  # noqa: E731
    topk_ids = rng.random((tokens, experts)).argsort(1)[:, :top_k].astype(np.int32)
    return (
        cast(rng.normal(size=(tokens, hidden))),
        jnp.asarray(topk_ids),
        jnp.asarray(rng.random((tokens, top_k)), jnp.float32),
        cast(rng.normal(size=(experts, intermediate, hidden)) / hidden**0.5),
        cast(rng.normal(size=(experts, intermediate, hidden)) / hidden**0.5),
        cast(rng.normal(size=(experts, hidden, intermediate)) / intermediate**0.5),
    )


def on_ranks(function, num_ranks=8):
    mesh = jax.make_mesh((num_ranks,), ("ep",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": P("ep"), "out_specs": P("ep")}
    return jax.jit(jax.shard_map(function, mesh=mesh, check_vma=False, **specs))


def dense_einsum(x, topk_ids, topk_weights, gate, up, down):
    """Every expert on every token, f32 throughout."""
    x, gate, up, down = (a.astype(jnp.float32) for a in (x, gate, up, down))
    h = jax.nn.silu(jnp.einsum("td,eid->tei", x, gate)) * jnp.einsum("td,eid->tei", x, up)
    outputs = jnp.einsum("tei,edi->ted", h, down)
    weights = (jax.nn.one_hot(topk_ids, gate.shape[0]) * topk_weights[..., None]).sum(1)
    return jnp.einsum("te,ted->td", weights, outputs)


def ragged(x, topk_ids, topk_weights, gate, up, down):
    """Routes sorted by expert through `lax.ragged_dot`."""
    top_k = topk_ids.shape[1]
    order = jnp.argsort(topk_ids.reshape(-1))
    sizes = jnp.bincount(topk_ids.reshape(-1), length=gate.shape[0]).astype(jnp.int32)
    rows = x[order // top_k]
    dot = lambda a, w: lax.ragged_dot(a, w.transpose(0, 2, 1), sizes)  # noqa: E731
    outputs = dot(jax.nn.silu(dot(rows, gate)) * dot(rows, up), down)
    outputs = outputs * topk_weights.reshape(-1)[order][:, None]
    return jnp.zeros_like(x).at[order // top_k].add(outputs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("tokens", [1, 7, 48, 700])
def test_matches_numpy_and_dense_einsum(dtype, scheme, tokens):
    operands = make_operands(tokens, dtype=dtype)
    y = jax.jit(functools.partial(fused_moe, scheme=scheme))(*operands)
    assert y.dtype == operands[0].dtype
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    for expected in (fused_moe_numpy(*operands), dense_einsum(*operands)):
        np.testing.assert_allclose(y.astype(np.float32), expected.astype(np.float32), **tolerance)


def test_matches_ragged_dot():
    operands = make_operands()
    np.testing.assert_allclose(fused_moe(*operands), ragged(*operands), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
@pytest.mark.parametrize("tokens", [48, 2000])
def test_expert_parallel_equals_one_rank_to_the_bit(num_ranks, tokens):
    # 2,000 tokens take the path that steps over empty blocks. Equal bits rest on XLA's CPU dot
    # giving a row the same value in any block, which holds at these sizes.
    operands = make_operands(tokens)
    one = jax.jit(fused_moe)(*operands)
    spread = on_ranks(functools.partial(fused_moe, axis_name="ep"), num_ranks)(*operands)
    different = np.argwhere(np.asarray(one) != np.asarray(spread))
    assert not len(different), f"first differing (token, column): {different[0]}"


@pytest.mark.parametrize("axis_name", [None, "ep"])
def test_invalid_ids_contribute_nothing_even_beside_nan(axis_name):
    operands = list(make_operands())
    operands[1] = operands[1].at[3, 1].set(-1).at[5, 0].set(16).at[9].set(1 << 30)
    operands[2] = operands[2].at[3, 1].set(jnp.nan).at[5, 0].set(jnp.inf)
    function = functools.partial(fused_moe, axis_name=axis_name)
    y = np.asarray(function(*operands) if axis_name is None else on_ranks(function)(*operands))
    assert (y[9] == 0).all()
    clean = [operands[0], operands[1], jnp.where(operands[1] == 16, 0.0, operands[2])]
    clean[2] = clean[2].at[3, 1].set(0.0)
    clean[1] = jnp.where((operands[1] < 0) | (operands[1] >= 16), 0, operands[1])
    clean[2] = clean[2].at[9].set(0.0)
    np.testing.assert_allclose(y, fused_moe_numpy(*clean, *operands[3:]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("poison", ["x", "weight"])
def test_a_nan_stays_in_its_token(poison):
    operands = list(make_operands())
    clean = np.asarray(fused_moe(*operands))
    which = 0 if poison == "x" else 2
    operands[which] = operands[which].at[0, 1].set(jnp.nan)
    for y in (
        fused_moe(*operands),
        fused_moe_numpy(*operands),
        on_ranks(functools.partial(fused_moe, axis_name="ep"))(*operands),
    ):
        assert np.isnan(y[0]).all()
        np.testing.assert_allclose(y[1:], clean[1:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [0, 8])
def test_no_routes_at_all(tokens):
    operands = list(make_operands(tokens=8))
    operands[:3] = [a[:tokens] for a in operands[:3]]
    operands[1] = jnp.full_like(operands[1], -1)
    y = fused_moe(*operands)
    assert y.shape == (tokens, 24)
    assert (np.asarray(y) == 0).all()
    assert (on_ranks(functools.partial(fused_moe, axis_name="ep"))(*operands) == y).all()


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("tokens", [48, 2000])
def test_gradients_match_dense_einsum(spread, tokens):
    operands = make_operands(tokens, experts=16)
    floats = (0, 2, 3, 4, 5)
    loss = lambda function: lambda *args: (function(*args).astype(jnp.float32) ** 2).sum()  # noqa: E731
    function = on_ranks(functools.partial(fused_moe, axis_name="ep")) if spread else fused_moe
    gradients = jax.jit(jax.grad(loss(function), floats))(*operands)
    expected = jax.jit(jax.grad(loss(dense_einsum), floats))(*operands)
    names = ("x", "topk_weights", "gate", "up", "down")
    for name, got, want in zip(names, gradients, expected, strict=True):
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        assert error < 1e-5, f"{name}: {error}"


def gradients_of(function, operands):
    """By name, of a loss that has a gradient everywhere."""
    floats = {"x": 0, "topk_weights": 2, "gate": 3, "up": 4, "down": 5}
    gradient = jax.jit(jax.grad(lambda *args: (function(*args) ** 2).sum(), tuple(floats.values())))
    gradients = gradient(*operands)
    return dict(zip(floats, map(np.asarray, gradients), strict=True))


def each_way(scheme):
    """Ways to run a scheme: on one rank, and spread over ranks where it can be."""
    yield functools.partial(fused_moe, scheme=scheme)
    if scheme == "blocked":
        yield on_ranks(functools.partial(fused_moe, axis_name="ep"))


@pytest.mark.parametrize(
    ("scheme", "tokens", "poison"),
    [
        ("dense", 48, np.nan),
        ("blocked", 48, np.inf),
        ("blocked", 2000, np.nan),  # the path that steps over empty blocks
    ],
)
def test_a_token_without_routes_reaches_no_gradient(scheme, tokens, poison):
    """Token 0 is what filler rows of a careless gather hold."""
    operands = list(make_operands(tokens))
    operands[1] = operands[1].at[0].set(-1)
    operands[0] = operands[0].at[0].set(0.0)
    for function in each_way(scheme):
        clean = gradients_of(function, operands)
        poisoned = [operands[0].at[0].set(poison), *operands[1:]]
        for name, found in gradients_of(function, poisoned).items():
            np.testing.assert_array_equal(found, clean[name], err_msg=name)
        assert (np.asarray(function(*poisoned))[0] == 0).all()


def test_weights_without_routes_reach_no_gradient():
    """Blocks without routes run with some expert's weights, of the last one as a rule."""
    operands = list(make_operands())
    operands[1] = operands[1] % 15
    poisoned = operands[:3] + [plane.at[15].set(jnp.inf) for plane in operands[3:]]
    for function in each_way("blocked"):
        clean = gradients_of(function, operands)
        for name, found in gradients_of(function, poisoned).items():
            np.testing.assert_array_equal(found, clean[name], err_msg=name)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_large_token_stays_with_the_small_weights_of_its_expert(scheme):
    """Beside another expert's weights it would overflow, and 0 * inf is NaN."""
    operands = list(make_operands(tokens=8, experts=4, top_k=1))
    ids = operands[1] = (jnp.arange(8, dtype=jnp.int32) % 4)[:, None]
    operands[0] = operands[0].at[0].set(1e20)
    for index in (3, 4):
        operands[index] = operands[index].at[0].multiply(1e-20)

    def by_indexing(x, topk_ids, topk_weights, gate, up, down):
        e = topk_ids[:, 0]
        h = jax.nn.silu(jnp.einsum("td,tid->ti", x, gate[e]))
        h = h * jnp.einsum("td,tid->ti", x, up[e])
        return topk_weights * jnp.einsum("ti,tdi->td", h, down[e])

    assert ids[4, 0] == 0  # a token of usual size shares the expert
    expected = gradients_of(by_indexing, operands)
    for name, found in gradients_of(functools.partial(fused_moe, scheme=scheme), operands).items():
        assert np.isfinite(expected[name]).all()
        scale = np.abs(expected[name]).reshape(len(found), -1).max(1).clip(1e-30)
        error = np.abs(found - expected[name]).reshape(len(found), -1).max(1) / scale
        assert (error < 1e-4).all(), f"{name}: {error}"


@pytest.mark.parametrize("balance", ["none", "haloq"])
def test_the_layer_adds_the_shared_expert_and_shows_its_plan(balance):
    operands = make_operands(tokens=64)
    x, topk_ids = operands[:2]

    def run(x, topk_ids, topk_weights, gate, up, down):
        y, plan = moe_layer(
            x,
            topk_ids,
            topk_weights,
            (gate, up, down),
            shared_expert=lambda t: 2 * t,
            balance=balance,
            axis_name="ep",
        )
        return y, plan.route_slot, plan.load_before[None], plan.load[None], plan.broadcasts[None]

    y, route_slot, before, load, broadcasts = on_ranks(run)(*operands)
    np.testing.assert_allclose(y, fused_moe(*operands) + 2 * x, rtol=1e-5, atol=1e-5)
    counts = np.stack([planner.histogram(ids, 16) for ids in np.split(np.asarray(topk_ids), 8)])
    expected = plan_counts(counts, num_helper_slots=4 if balance == "haloq" else 0)
    assert (np.asarray(before) == expected.load_before).all()
    assert (np.asarray(load) == expected.load).all()
    if balance == "haloq":
        assert expected.num_broadcasts > 0
        assert (np.asarray(broadcasts) == expected.broadcasts).all()
    assert (np.bincount(np.asarray(route_slot).ravel() // 6, minlength=8) == load[0]).all()


def test_stacked_weights_are_selected_by_layer():
    first, second = make_operands(), make_operands(experts=16)[:3] + make_operands(50)[3:]
    stacked = tuple(jnp.stack(planes) for planes in zip(first[3:], second[3:], strict=True))
    run = jax.jit(lambda layer: moe_layer(*first[:3], stacked, layer=layer)[0])
    np.testing.assert_array_equal(run(1), jax.jit(fused_moe)(*first[:3], *second[3:]))


@pytest.mark.parametrize(
    ("index", "replacement", "error", "words"),
    [
        (0, np.zeros((48, 23), np.float32), ValueError, ["gate", "(16, 40, 24)", "23"]),
        (0, np.zeros(24, np.float32), ValueError, ["x has shape (24,)"]),
        (1, np.zeros((47, 3), np.int32), ValueError, ["(47, 3)", "(48, top_k)"]),
        (1, np.zeros((48, 3), np.float32), TypeError, ["topk_ids", "float32", "int32"]),
        (2, np.zeros((48, 2), np.float32), ValueError, ["(48, 2)", "(48, 3)"]),
        (4, np.zeros((16, 41, 24), np.float32), ValueError, ["up", "41", "(16, 40, 24)"]),
        (5, np.zeros((16, 40, 24), np.float32), ValueError, ["down", "(16, 24, 40)"]),
        (3, np.zeros((16, 40, 24), np.float16), TypeError, ["gate", "float16", "float32"]),
    ],
)
def test_operands_that_do_not_fit_are_refused(index, replacement, error, words):
    operands = list(make_operands())
    operands[index] = jnp.asarray(replacement)
    for function in (fused_moe, fused_moe_numpy):
        with pytest.raises(error, match=".*".join(map(re.escape, words))):
            function(*operands)


def test_options_that_do_not_exist_are_refused():
    operands = make_operands()
    with pytest.raises(ValueError, match="scheme='sparse'"):
        fused_moe(*operands, scheme="sparse")
    with pytest.raises(ValueError, match="balance='static'"):
        moe_layer(*operands[:3], operands[3:], balance="static")
