"""What bad input does, exactly: the error's words, or the defined result."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from layers import (
    AXIS,
    apply_layer,
    assert_same_bits,
    dense_numpy,
    jitted_layer,
    make_domain,
    make_fp8_problem,
    make_problem,
    mesh_of,
    run_layer,
)

import jax_iser
from jax_iser.domain import DomainConfig
from jax_iser.methods.fused import checks, fused_moe

PROBLEM = make_problem("W2")
SIZES = PROBLEM.sizes


@pytest.fixture(scope="module")
def domain():
    with make_domain(PROBLEM, poison=True) as one:
        yield one


# Values: never an error, never undefined.


@pytest.mark.parametrize("bad", [-1, 16, -(2**31), 2**31 - 1])
def test_ids_out_of_range_are_padding(domain, bad):
    problem = make_problem("W2")
    problem.topk_ids[::2, 0] = bad
    problem.topk_weights[::2, 0] = np.nan  # nothing of a padded route is read
    y, plan = run_layer(problem, domain=domain)
    clean = make_problem("W2")
    clean.topk_weights[::2, 0] = 0
    clean.topk_ids[::2, 0] = -7
    np.testing.assert_allclose(y, dense_numpy(clean), atol=2e-5, rtol=2e-5)
    assert (plan.route_slot[::2, 0] == -1).all()
    assert (plan.route_slot[1::2] >= 0).all()
    assert plan.load.sum() == (problem.topk_ids.size * 3) // 4


def test_all_padding_gives_zeros(domain):
    problem = make_problem("W2")
    problem.topk_ids[:] = -1
    y, plan = run_layer(problem, domain=domain)
    assert_same_bits(y, np.zeros_like(y))
    assert plan.num_broadcasts == 0
    assert plan.load.sum() == 0
    assert (plan.route_slot == -1).all()


def test_one_rank_without_tokens(domain):
    problem = make_problem("W2")
    problem.topk_ids[24:48] = -1
    y, plan = run_layer(problem, domain=domain)
    np.testing.assert_allclose(y, dense_numpy(problem), atol=2e-5, rtol=2e-5)
    assert (y[24:48] == 0).all()
    assert plan.num_broadcasts > 0


def test_no_tokens_at_all(domain):
    problem = make_problem("W2", tokens=0)
    y, plan = run_layer(problem, domain=domain)
    assert y.shape == (0, 32)
    assert plan.route_slot.shape == (0, 2)
    assert plan.num_broadcasts == 0
    run_layer(PROBLEM, domain=domain)


def test_fewer_tokens_than_the_domain_takes(domain):
    problem = make_problem("W2", tokens=5)
    y, _ = run_layer(problem, domain=domain)
    np.testing.assert_allclose(y, dense_numpy(problem), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_bad_tokens_stay_where_they_are(domain, value):
    """A row that is not finite spoils its own output row only, replicas or not."""
    problem = make_problem("W2")
    problem.x[100] = value
    y, _ = run_layer(problem, domain=domain)
    good = np.delete(np.arange(len(y)), 100)
    assert np.isfinite(y[good]).all()
    assert not np.isfinite(y[100]).any()
    assert_same_bits(y[good], run_layer(PROBLEM, domain=domain)[0][good])


def test_nan_logits_give_defined_routes():
    """The router's ids are valid or padding whatever the logits; only that token is spoilt."""
    from jax_iser.router import route

    logits = np.random.default_rng(0).standard_normal((192, 16)).astype(np.float32)
    clean_ids, _ = route(jnp.asarray(logits), top_k=2)
    logits[7], logits[50, 3] = np.nan, np.nan
    ids, weights = route(jnp.asarray(logits), top_k=2)
    assert ((ids >= -1) & (ids <= 16)).all()
    good = np.delete(np.arange(192), [7, 50])
    np.testing.assert_array_equal(ids[good], clean_ids[good])
    problem = make_problem("W2")
    problem.topk_ids[:], problem.topk_weights[:] = ids, weights
    y, plan = run_layer(problem)
    assert np.isfinite(y[good]).all()
    assert plan.status == 0


def test_nan_weights_of_a_token_stay_there(domain):
    problem = make_problem("W2")
    problem.topk_weights[11, 1] = np.nan
    y, _ = run_layer(problem, domain=domain)
    assert np.isnan(y[11]).all()
    assert np.isfinite(np.delete(y, 11, axis=0)).all()


# Sizes and options of a Domain.


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_experts": 20}, "num_experts=20 is not divisible by the 8 ranks; pad the experts"),
        ({"top_k": 17}, "top_k=17 exceeds num_experts=16"),
        ({"top_k": 0}, "top_k=0 is below 1"),
        ({"hidden_size": 0}, "hidden_size=0 is below 1"),
        ({"hidden_size": 2**31}, "hidden_size=2147483648 is no 32-bit integer"),
        ({"intermediate_size": 2**40}, "intermediate_size=1099511627776 is no 32-bit integer"),
        ({"max_routes_per_rank": 2**31}, "max_routes_per_rank=2147483648 is no 32-bit integer"),
        ({"num_experts": 2048}, r"num_experts=2048 is outside 1\.\.1024"),
        ({"num_helper_slots": 17}, r"num_helper_slots=17 is outside 0\.\.16"),
        ({"min_group_size": 3}, "min_group_size=3 is not one of 1, 2, 4"),
        ({"dtype": "float16"}, "dtype='float16' is not one of float32, bfloat16"),
        ({"bank": "own"}, "bank='own' is not one of shared, per_layer"),
        ({"resident": True}, "resident=True needs bank='per_layer', got bank='shared'"),
        ({"copy_rule": "fast"}, "copy_rule='fast' is not one of"),
        ({"max_routes_per_rank": 0}, "max_routes_per_rank=0 is below 1"),
        ({"max_tokens_per_rank": -1}, "max_tokens_per_rank=-1 is below 0"),
        ({"max_tokens_per_rank": 2**28}, "routes a call, at most 2147483647"),
        ({"timeout_s": 0.0}, r"timeout_s=0.0 is outside \(0, 1e9\] seconds"),
        ({"ranks_per_device": 0}, "ranks_per_device=0 is below 1"),
    ],
)
def test_domain_sizes(change, text):
    with pytest.raises(ValueError, match=text):
        jax_iser.Domain(mesh_of(8), AXIS, **SIZES | change)


def test_unknown_option_of_a_domain():
    words = "a Domain has no option helper_slots; did you mean num_helper_slots"
    with pytest.raises(TypeError, match=words):
        jax_iser.Domain(mesh_of(8), AXIS, **SIZES, helper_slots=4)
    with pytest.raises(TypeError, match=r"num_ranks follows from the mesh .*; leave it out"):
        jax_iser.Domain(mesh_of(8), AXIS, **SIZES, num_ranks=4)
    words = "missing 4 required keyword-only arguments: 'top_k', 'hidden_size'"
    with pytest.raises(TypeError, match=words):
        jax_iser.Domain(mesh_of(8), AXIS, num_experts=16)


def test_the_signature_of_a_domain_is_that_of_its_configuration():
    named = {
        name: each.default
        for name, each in inspect.signature(jax_iser.Domain).parameters.items()
        if each.kind == each.KEYWORD_ONLY
    }
    fields = {
        field.name: inspect.Parameter.empty
        if field.default is dataclasses.MISSING
        else field.default
        for field in dataclasses.fields(DomainConfig)
        if field.name not in ("num_ranks", "platform")
    }
    assert named == fields
    odd = {
        "num_helper_slots": 3,
        "min_group_size": 2,
        "min_routes": 5,
        "gain_threshold": 1100,
        "copy_rule": "sami",
        "num_layers": 3,
        "bank": "per_layer",
        "resident": True,
        "max_routes_per_rank": 77,
        "timeout_s": 61.0,
        "startup_timeout_s": 62.0,
        "poison": True,
    }
    with make_domain(PROBLEM, **odd) as own:
        assert {name: getattr(own.config, name) for name in odd} == odd


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16, jnp.dtype("bfloat16")])
def test_dtypes_are_kept_by_name(dtype):
    config = DomainConfig(
        num_ranks=8,
        **SIZES | {"dtype": dtype, "hidden_size": 128, "intermediate_size": 128},
        weight_dtype=jnp.float8_e4m3fn,
    )
    assert (config.dtype, config.weight_dtype) == ("bfloat16", "float8_e4m3fn")


def test_ranks_that_do_not_share_devices_evenly():
    sizes = {key: value for key, value in SIZES.items() if key != "num_experts"}
    with pytest.raises(ValueError, match="num_ranks=8 is not divisible by ranks_per_device=3"):
        DomainConfig(num_ranks=8, num_experts=16, ranks_per_device=3, **sizes)


def test_meshes_that_do_not_fit():
    with pytest.raises(TypeError, match=r"mesh is a list, expected a jax\.sharding\.Mesh"):
        jax_iser.Domain(jax.devices(), AXIS, **SIZES)
    with pytest.raises(ValueError, match=r'axis "tp" is not among the mesh axes \(\'ep\',\)'):
        jax_iser.Domain(mesh_of(8), "tp", **SIZES)
    with pytest.raises(ValueError, match=r"\('ep',\); pass the name of the expert-parallel one"):
        jax_iser.Domain(mesh_of(8), "tp", **SIZES)
    with pytest.raises(TypeError, match=r"ranks_per_device=1\.5 is not an integer"):
        jax_iser.Domain(mesh_of(8), AXIS, **SIZES, ranks_per_device=1.5)
    square = Mesh(np.array(jax.devices()).reshape(2, 4), ("dp", AXIS))
    with pytest.raises(ValueError, match=r"spans axis \"ep\" alone, .* \{'dp': 2\}"):
        jax_iser.Domain(square, AXIS, **SIZES)


# Operands that do not fit, at trace time.


def replaced(**changes):
    fields = dict(zip(("x", "topk_ids", "topk_weights", "weights"), PROBLEM.operands, strict=True))
    return tuple({**fields, **changes}.values())


def widened(plane, axis):
    return np.concatenate([plane, plane], axis=axis)


WEIGHTS = PROBLEM.weights
BAD_OPERANDS = {
    "x of another width": (
        {"x": widened(PROBLEM.x, 1)},
        ValueError,
        r"x has shape \(24, 64\), the Domain expects \[tokens, 32\]",
    ),
    "x of another type": (
        {"x": PROBLEM.x.astype(jnp.bfloat16)},
        TypeError,
        "x is bfloat16, the Domain expects float32; cast it",
    ),
    "x of three dimensions": (
        {"x": PROBLEM.x[:, None]},
        ValueError,
        r"x has shape \(24, 1, 32\)",
    ),
    "ids of another width": (
        {"topk_ids": widened(PROBLEM.topk_ids, 1)},
        ValueError,
        r"topk_ids has shape \(24, 4\), the Domain expects \[tokens, 2\]",
    ),
    "ids of another type": (
        {"topk_ids": PROBLEM.topk_ids.astype(np.float32)},
        TypeError,
        "topk_ids is float32, the Domain expects int32; cast it",
    ),
    "small ids": (
        {"topk_ids": PROBLEM.topk_ids.astype(np.uint8)},
        TypeError,
        "topk_ids is uint8, the Domain expects int32",
    ),
    "route weights of another type": (
        {"topk_weights": PROBLEM.topk_weights.astype(jnp.bfloat16)},
        TypeError,
        "topk_weights is bfloat16, the Domain expects float32",
    ),
    "route weights of another width": (
        {"topk_weights": PROBLEM.topk_weights[:, :1]},
        ValueError,
        r"topk_weights has shape \(24, 1\), the Domain expects \[tokens, 2\]",
    ),
    "more ids than tokens": (
        {"topk_ids": widened(PROBLEM.topk_ids, 0)[: 8 * 30]},
        ValueError,
        "30",
    ),
    "fewer ids than tokens": (
        {"topk_ids": PROBLEM.topk_ids[: 8 * 20]},
        ValueError,
        "x has 24 tokens, topk_ids has 20",
    ),
    "more tokens than the Domain takes": (
        {
            "x": widened(PROBLEM.x, 0),
            "topk_ids": widened(PROBLEM.topk_ids, 0),
            "topk_weights": widened(PROBLEM.topk_weights, 0),
        },
        ValueError,
        "x brings 48 tokens per rank, .* max_tokens_per_rank=24; make a larger Domain",
    ),
    "experts of another width": (
        {"weights": WEIGHTS._replace(gate=widened(WEIGHTS.gate, 1))},
        ValueError,
        r"gate has shape \(2, 96, 32\), the Domain expects \(2, 48, 32\)",
    ),
    "down not transposed": (
        {"weights": WEIGHTS._replace(down=WEIGHTS.up)},
        ValueError,
        r"down has shape \(2, 48, 32\), the Domain expects \(2, 32, 48\)",
    ),
    "too many experts": (
        {"weights": jax_iser.ExpertWeights(*(widened(plane, 0) for plane in WEIGHTS.planes))},
        ValueError,
        r"gate has shape \(4, 48, 32\), the Domain expects \(2, 48, 32\)",
    ),
    "weights of another type": (
        {"weights": WEIGHTS._replace(up=WEIGHTS.up.astype(jnp.bfloat16))},
        TypeError,
        "up is bfloat16, the Domain expects float32; cast it",
    ),
}


@pytest.mark.parametrize("name", BAD_OPERANDS)
def test_operands(domain, name):
    change, kind, text = BAD_OPERANDS[name]
    with pytest.raises(kind, match=text):
        jax.eval_shape(
            functools.partial(apply_layer, domain.mesh), *replaced(**change), domain.handle
        )


def test_rows_that_the_ranks_of_a_device_do_not_share_evenly():
    with make_domain(PROBLEM, ranks_per_device=4) as domain:
        operands = [a[: 2 * 47] for a in PROBLEM.operands[:3]]
        words = "x has 47 rows on a device, not divisible by ranks_per_device=4; pad them to 48"
        with pytest.raises(ValueError, match=words):
            jax.eval_shape(
                functools.partial(apply_layer, domain.mesh),
                *operands,
                PROBLEM.weights,
                domain.handle,
            )


def test_stacks_of_different_depth(domain):
    weights = jax_iser.ExpertWeights(WEIGHTS.gate[None], WEIGHTS.up, WEIGHTS.down)

    def on_device(x, ids, topk_weights, handle):
        mine = jax.tree.map(lambda plane: jnp.asarray(plane)[..., :2, :, :], weights)
        return jax_iser.moe_layer(x, ids, topk_weights, mine, handle)[0]

    call = jax.shard_map(on_device, mesh=domain.mesh, in_specs=P(AXIS), out_specs=P(AXIS))
    with pytest.raises(ValueError, match="stack all of them over the same number of layers"):
        jax.eval_shape(call, *PROBLEM.operands[:3], domain.handle)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"method": "fast"}, "method='fast' is not one of fused, portable, dense"),
        ({"balance": "some"}, "balance='some' is not one of haloq, none"),
    ],
)
def test_options(domain, options, text):
    with pytest.raises(ValueError, match=text):
        run_layer(PROBLEM, domain=domain, options=options)


def test_no_domain(domain):
    def on_device(x, ids, topk_weights, weights):
        return jax_iser.moe_layer(x, ids, topk_weights, weights)[0]

    call = jax.shard_map(on_device, mesh=domain.mesh, in_specs=P(AXIS), out_specs=P(AXIS))
    with pytest.raises(ValueError, match=r'method="fused" needs a Domain; pass domain\.handle'):
        jax.eval_shape(call, *PROBLEM.operands)


def test_a_domain_in_place_of_its_handle(domain):
    def on_device(x, ids, topk_weights, weights):
        return jax_iser.moe_layer(x, ids, topk_weights, weights, domain)[0]

    call = jax.shard_map(on_device, mesh=domain.mesh, in_specs=P(AXIS), out_specs=P(AXIS))
    with pytest.raises(TypeError, match=r"domain is a Domain, .* pass domain\.handle"):
        jax.eval_shape(call, *PROBLEM.operands)


def test_a_captured_handle(domain):
    def on_device(x, ids, topk_weights, weights):
        return jax_iser.moe_layer(x, ids, topk_weights, weights, domain.handle)[0]

    call = jax.shard_map(on_device, mesh=domain.mesh, in_specs=P(AXIS), out_specs=P(AXIS))
    with pytest.raises(ValueError, match=r"handle has 8 rows, .* in_specs PartitionSpec"):
        jax.eval_shape(call, *PROBLEM.operands)


# What only a running call can know.


@pytest.mark.parametrize("layer", [1, -1, 2**30])
def test_layer_outside_the_domain(layer):
    with make_domain(PROBLEM) as own:
        call = jax.jit(
            lambda layer: apply_layer(own.mesh, *PROBLEM.operands, own.handle, layer=layer)
        )
        words = rf"IserError: layer {layer} is outside the Domain's num_layers=1; make the Domain"
        with pytest.raises(jax.errors.JaxRuntimeError, match=words):
            jax.block_until_ready(call(jnp.int32(layer)))
        own.check()  # the call did not begin: the Domain goes on
        run_layer(PROBLEM, domain=own)


def test_layer_outside_the_stack():
    problem = make_problem("W2", num_layers=2)
    with make_domain(problem, num_layers=3) as own:
        call = jax.jit(
            lambda layer: apply_layer(own.mesh, *problem.operands, own.handle, layer=layer)
        )
        words = "IserError: layer 2 is outside the 2 stacked layers; pass weights stacked over all"
        with pytest.raises(jax.errors.JaxRuntimeError, match=words):
            jax.block_until_ready(call(jnp.int32(2)))
        jax.block_until_ready(call(jnp.int32(1)))


def test_layers_that_are_known_when_a_program_is_traced(domain):
    call = functools.partial(apply_layer, domain.mesh, *PROBLEM.operands, domain.handle)
    for layer, kind, words in (
        (1, ValueError, "layer=1 is outside the Domain's num_layers=1; make the Domain"),
        (-1, ValueError, "layer=-1 is outside"),
        (1.5, TypeError, r"layer is 1\.5, expected one integer"),
        (True, TypeError, "layer is True, expected one integer"),
    ):
        with pytest.raises(kind, match=words):
            call(layer=layer)
    with pytest.raises(TypeError, match="weights_version is float32 of shape"):
        call(weights_version=jnp.ones(2))


@pytest.mark.parametrize("make", [make_problem, make_fp8_problem])
def test_weights_stacked_over_no_layer(monkeypatch, make):
    problem = make("W2", num_layers=1)
    weights = jax_iser.ExpertWeights(*(plane[:0] for plane in problem.weights.planes))
    operands = (*problem.operands[:3], weights)
    with make_domain(problem) as own:
        call = jax.jit(functools.partial(apply_layer, own.mesh, layer=0))
        with pytest.raises(ValueError, match=r"they are stacked over 0 layers; stack those of one"):
            call(*operands, own.handle)
        for module in (checks, fused_moe):
            monkeypatch.setattr(module, "check_weights", lambda *_: None)
        with pytest.raises(jax.errors.JaxRuntimeError, match="IserError: weights are stacked over"):
            jax.block_until_ready(call(*operands, own.handle))


def test_a_domain_as_an_operand_of_a_program(domain):
    words = r"a jax_iser\.Domain is passed where arrays belong; pass domain\.handle"
    with pytest.raises(TypeError, match=words):
        jitted_layer(domain.mesh)(*PROBLEM.operands, domain)
    with pytest.raises(TypeError, match=r"domain is a Domain, .* pass domain\.handle"):
        jax_iser.plan(PROBLEM.topk_ids, domain)
    with pytest.raises(ValueError, match="balance='some' is not one of haloq, none"):
        jax_iser.plan(PROBLEM.topk_ids, domain.handle, balance="some")


def test_handle_of_a_closed_domain():
    with make_domain(PROBLEM) as own:
        handle = own.handle
        expected, _ = jitted_layer(own.mesh)(*PROBLEM.operands, handle)
    words = (
        r"IserError: Domain \d+ is closed, or was released because nothing kept it: attach the "
        r"open Domain again \(jax_iser\.nnx\.attach\(model, domain\)\), or pass its handle"
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match=words):
        jax.block_until_ready(jitted_layer(mesh_of(8))(*PROBLEM.operands, handle))
    assert_same_bits(run_layer(PROBLEM)[0], expected)


def test_words_that_are_no_handle(domain):
    words = jax.device_put(np.zeros((8, 4), np.uint32), domain.handle.words.sharding)
    forged = jax_iser.DomainHandle(words, domain.config)
    with pytest.raises(jax.errors.JaxRuntimeError, match="IserError: the domain operand is not a"):
        jax.block_until_ready(jitted_layer(domain.mesh)(*PROBLEM.operands, forged))
    run_layer(PROBLEM, domain=domain)


def test_handle_with_the_sizes_of_another_domain(domain):
    """A handle whose sizes lie: caught by the Domain's own, not read out of bounds."""
    with make_domain(PROBLEM, max_tokens_per_rank=4) as small:
        forged = jax_iser.DomainHandle(small.handle.words, domain.config)
        words = "the program was compiled for a Domain of another configuration than Domain"
        with pytest.raises(jax.errors.JaxRuntimeError, match=words):
            jax.block_until_ready(jitted_layer(domain.mesh)(*PROBLEM.operands, forged))


def test_a_ticket_used_twice(domain):
    def on_device(x, ids, topk_weights, weights, handle):
        ticket, x = jax_iser.start(x, ids, weights, handle)
        y, _ = jax_iser.fused_moe(x, topk_weights, weights, ticket)
        again, _ = jax_iser.fused_moe(y, topk_weights, weights, ticket)
        return again

    call = jax.shard_map(
        on_device, mesh=domain.mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="use each ticket once"):
        jax.block_until_ready(jax.jit(call)(*PROBLEM.operands, domain.handle))
    run_layer(PROBLEM, domain=domain)


def test_other_weights_than_start_got(domain):
    def on_device(x, ids, topk_weights, weights, handle):
        ticket, x = jax_iser.start(x, ids, weights, handle)
        other = jax_iser.ExpertWeights(*(plane * 2 for plane in weights.planes))
        return jax_iser.fused_moe(x, topk_weights, other, ticket)[0]

    call = jax.shard_map(
        on_device, mesh=mesh_of(8), in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False
    )
    own = make_domain(PROBLEM)
    with pytest.raises(jax.errors.JaxRuntimeError, match="pass the same arrays to both"):
        jax.block_until_ready(jax.jit(call)(*PROBLEM.operands, own.handle))
    with pytest.raises(jax.errors.JaxRuntimeError, match="other tokens or weights than its start"):
        run_layer(PROBLEM, domain=own)
    with pytest.raises(jax_iser.IserError, match="make a new Domain") as error:
        own.close()
    assert error.value.code == 7


def test_a_program_that_fails_between_start_and_fused_moe():
    """Its call never ends; the next one says so at its limit, and a new Domain works."""

    def on_device(x, ids, topk_weights, weights, handle):
        def shared_expert(x):
            after_start = ids + (0 * x[:, :2]).astype(jnp.int32)
            broken = jax_iser.plan(after_start, handle, layer=5 + 0 * after_start[0, 0])
            return x + broken.load.sum()

        return jax_iser.moe_layer(
            x, ids, topk_weights, weights, handle, shared_expert=shared_expert, axis_name=AXIS
        )[0]

    call = jax.shard_map(
        on_device, mesh=mesh_of(8), in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False
    )
    own = make_domain(PROBLEM, timeout_s=1.0)
    run_layer(PROBLEM, domain=own)
    with pytest.raises(jax.errors.JaxRuntimeError, match="layer 5 is outside"):
        jax.block_until_ready(jax.jit(call)(*PROBLEM.operands, own.handle))
    words = r"rank (\d) waited 1000 ms for the call before this one to end .* lost its fused_moe"
    with pytest.raises(jax.errors.JaxRuntimeError, match=words):
        run_layer(PROBLEM, domain=own)
    with pytest.raises(jax_iser.IserError, match=words):
        own.close()
    run_layer(PROBLEM)


def test_gradients_of_the_parts_alone(domain):
    def on_device(x, ids, topk_weights, weights, handle):
        ticket, x = jax_iser.start(x, ids, weights, handle)
        return jax_iser.fused_moe(x, topk_weights, weights, ticket)[0].sum()[None]

    call = jax.shard_map(
        on_device, mesh=domain.mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False
    )
    with pytest.raises(ValueError, match=r"FFI call to `jax_iser\.\w+` cannot be differentiated"):
        jax.grad(lambda x: call(x, *PROBLEM.operands[1:], domain.handle).sum())(PROBLEM.x)


def test_unknown_stage_of_a_stall(domain):
    with pytest.raises(
        ValueError, match="stage='lunch' is not one of counts, staging, dispatch, READY"
    ):
        domain.stall(0, "lunch", 1.0)
    with pytest.raises(ValueError, match="rank=8 is not one of the 8 ranks"):
        domain.stall(8, "counts", 1.0)


def test_helper_slot_that_is_not_there(domain):
    for place, words in (
        ((8, 0, 0), r"rank=8: .* 0\.\.7"),
        ((-1, 0, 0), "rank=-1: "),
        ((0, 1, 0), r"layer=1: .* 0\.\.0"),
        ((0, 0, 4), r"helper_idx=4: no such helper slot; helper_idx is in 0\.\.3"),
    ):
        with pytest.raises(ValueError, match=words):
            domain.helper(*place)
