"""The layer on GPUs under JAX's transformations, beside other programs and native collectives."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gpu.on_gpus import EIGHT, IS_GPU, Place, domain_at, only_on_gpus, over, problem_at
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from layers import (
    AXIS,
    OFF,
    apply_layer,
    assert_same_bits,
    jitted_layer,
    mesh_of,
    run_layer,
    sum_after_layers,
)

import jax_iser
import jax_iser.nnx

pytestmark = pytest.mark.gpu
NUM_LAYERS = 5


def scan_of_layers(mesh, x, topk_ids, topk_weights, weights, handle, **options):
    """Layers one after the other, their number traced: `(x, (loads, broadcasts, statuses))`."""

    def body(x, layer):
        y, plan = apply_layer(
            mesh, x, topk_ids, topk_weights, weights, handle, layer=layer, **options
        )
        return x + y, (plan.load, plan.num_broadcasts, plan.status)

    return lax.scan(body, x, jnp.arange(NUM_LAYERS))


def layer_by_layer(problem, domain):
    """The same layers from Python, without replicas."""
    x = problem.x
    for layer in range(NUM_LAYERS):
        weights = jax_iser.ExpertWeights(*(plane[layer] for plane in problem.weights.planes))
        call = jitted_layer(domain.mesh, **OFF)
        x = x + call(x, *problem.operands[1:3], weights, domain.handle)[0]
    return np.asarray(x)


@pytest.mark.parametrize("bank", ["shared", "per_layer"])
@pytest.mark.parametrize("engine", ["f32", "tensor"])
@over(*EIGHT)
def test_scan_over_stacked_weights(place, engine, bank):
    problem = problem_at(place, engine=engine, num_layers=NUM_LAYERS)
    with domain_at(problem, place, num_layers=NUM_LAYERS, bank=bank) as domain:
        expected = layer_by_layer(problem, domain)
        call = jax.jit(lambda *args: scan_of_layers(domain.mesh, *args))
        for run in range(3):
            y, (load, count, status) = call(*problem.operands, domain.handle)
            assert (np.asarray(status) == 0).all()
            assert_same_bits(y, expected, f"x after {NUM_LAYERS} layers, run {run}")
            assert (np.asarray(count) > 0).all()
            assert (np.asarray(load).sum(axis=1) == problem.topk_ids.size).all()


def test_no_weight_slice_in_the_compiled_scan(widest):
    """Calls read the stack in place: nothing of a layer's size of weights is made in the loop."""
    problem = problem_at(widest, num_layers=NUM_LAYERS)
    experts = 32 // widest.gpus
    with domain_at(problem, widest, num_layers=NUM_LAYERS) as domain:
        weights = jax.device_put(problem.weights, NamedSharding(domain.mesh, P(None, AXIS)))
        operands = (*problem.operands[:3], weights, domain.handle)
        call = jax.jit(lambda *args: scan_of_layers(domain.mesh, *args))
        text = call.lower(*operands).compile().as_text()
    assert "jax_iser.start" in text
    assert re.search(rf"f32\[5,{experts},100,68\]", text), "the stack is not found: a blind test"
    shape = rf"= f32\[(?:1,)?{experts},(?:100,68|68,100)\]"
    makers = [line.strip() for line in text.splitlines() if re.search(shape, line)]
    assert not makers, "\n".join(makers)


def test_remat_and_gradients_in_a_scan(widest):
    """`jax.checkpoint` runs the layers again in the backward pass; all calls pair up."""
    problem = problem_at(widest, num_layers=NUM_LAYERS)
    with domain_at(problem, widest, num_layers=NUM_LAYERS) as domain:
        with jax.default_matmul_precision("highest"):
            totals = [partial(sum_after_layers, domain, problem, remat=r) for r in (False, True)]
            found = [np.asarray(jax.jit(jax.grad(total))(problem.x)) for total in totals]
        # The two programs' products may be fused in other ways.
        np.testing.assert_allclose(found[1], found[0], rtol=1e-3, atol=1e-3)
        assert np.abs(found[0]).max() > 1e-3
        domain.check()


@pytest.mark.parametrize("wanted", [0, 1, 2], ids=["x", "topk_weights", "weights"])
def test_gradients_are_the_references(widest, wanted):
    problem = problem_at(widest, top_k=3)
    problem.topk_ids[::5, 2] = -1
    operands = (problem.x, problem.topk_weights, problem.weights)
    target = np.random.default_rng(5).standard_normal(problem.x.shape).astype(np.float32)
    gradients = []
    with domain_at(problem, widest) as domain, jax.default_matmul_precision("highest"):
        for method in ("fused", "reference"):

            def loss(value, method=method):
                x, scales, weights = (*operands[:wanted], value, *operands[wanted + 1 :])
                y, _ = apply_layer(
                    domain.mesh, x, problem.topk_ids, scales, weights, domain.handle, method=method
                )
                return jnp.sum((y - target) ** 2)

            gradients.append(jax.tree.leaves(jax.jit(jax.grad(loss))(operands[wanted])))
    for fused, plain in zip(*gradients, strict=True):
        scale = float(np.abs(plain).max())
        assert scale > 1e-3, "the gradient is all but zero: nothing is tested"
        np.testing.assert_allclose(fused, plain, atol=1e-4 * scale, rtol=1e-3)


@over(*EIGHT)
def test_donated_operands(place):
    problem = problem_at(place)
    with domain_at(problem, place) as domain:
        expected, _ = run_layer(problem, domain=domain)
        sharding = NamedSharding(domain.mesh, P(AXIS))
        call = jax.jit(lambda *args: apply_layer(domain.mesh, *args)[0], donate_argnums=(0, 1, 2))
        for run in range(5):
            operands = [jax.device_put(a.copy(), sharding) for a in problem.operands[:3]]
            y = call(*operands, problem.weights, domain.handle)
            assert operands[0].is_deleted()
            assert_same_bits(y, expected, f"output of run {run}")


@over(*EIGHT)
def test_donated_weights(place):
    """What the call leaves may be overwritten at once, also on the rank that finishes first."""
    problem = problem_at(place, hidden=256, intermediate=512)

    mesh = mesh_of(place.gpus)

    def overwrite(y, weights):
        """Behind this device's call alone, in place since weights are donated."""
        return jax.tree.map(lambda w: jnp.where(jnp.isnan(y).all(), w, -1.0), weights)

    def step(x, ids, topk_weights, weights, handle):
        y, _ = apply_layer(mesh, x, ids, topk_weights, weights, handle)
        specs = {"in_specs": P(AXIS), "out_specs": P(AXIS)}
        return y, jax.shard_map(overwrite, mesh=mesh, **specs)(y, weights)

    call = jax.jit(step, donate_argnums=(3,))
    with domain_at(problem, place) as domain:
        expected, _ = run_layer(problem, domain=domain, options=OFF)
        for run in range(5):
            weights = jax.device_put(
                jax.tree.map(np.copy, problem.weights), NamedSharding(domain.mesh, P(AXIS))
            )
            y, after = call(*problem.operands[:3], weights, domain.handle)
            assert_same_bits(y, expected, f"output of run {run}")
            assert (np.asarray(after.down) == -1).all()


@over(*EIGHT)
def test_weights_freed_right_after_the_call(place):
    """Python drops them while the call may still run; what takes their memory is written over."""
    problem = problem_at(place, hidden=256, intermediate=512)
    with domain_at(problem, place) as domain:
        sharding = NamedSharding(domain.mesh, P(AXIS))
        expected, _ = run_layer(problem, domain=domain, options=OFF)
        operands = jax.device_put(problem.operands[:3], sharding)
        call, results = jitted_layer(domain.mesh), []
        for _ in range(8):
            weights = jax.device_put(problem.weights, sharding)
            results.append(call(*operands, weights, domain.handle)[0])
            del weights
            # XLA orders what reuses their memory behind what was enqueued on its own streams.
            shape = problem.weights.gate.shape
            noise = [jnp.full(shape, jnp.nan, device=sharding) for _ in range(3)]
            del noise
        for run, y in enumerate(results):
            assert_same_bits(y, expected, f"output of run {run}")


@over(*EIGHT)
def test_two_domains_side_by_side(place):
    """One program uses two Domains at once, other programs one of them each."""
    problem = problem_at(place, "W2")
    other = problem_at(place, "W3", "tensor", num_experts=16, top_k=2, seed=1)
    mesh = mesh_of(place.gpus)

    @jax.jit
    def both(operands, handle, other_operands, other_handle):
        return (
            apply_layer(mesh, *operands, handle)[0],
            apply_layer(mesh, *other_operands, other_handle)[0],
        )

    with domain_at(problem, place) as domain, domain_at(other, place) as other_domain:
        expected = run_layer(problem, domain=domain, options=OFF)[0]
        expected_other = run_layer(other, domain=other_domain, options=OFF)[0]
        for run in range(10):
            y, y_other = both(problem.operands, domain.handle, other.operands, other_domain.handle)
            assert_same_bits(y, expected, f"first Domain, run {run}")
            assert_same_bits(y_other, expected_other, f"second Domain, run {run}")
            assert_same_bits(run_layer(other, domain=other_domain)[0], expected_other)
            assert_same_bits(run_layer(problem, domain=domain)[0], expected)


def test_two_domains_of_one_configuration(widest):
    """They share programs and, in one of them, weights."""
    problem = problem_at(widest)
    mesh = mesh_of(widest.gpus)

    @jax.jit
    def both(operands, first, second):
        return apply_layer(mesh, *operands, first)[0], apply_layer(mesh, *operands, second)[0]

    with domain_at(problem, widest) as first, domain_at(problem, widest) as second:
        expected = run_layer(problem, domain=first, options=OFF)[0]
        for run in range(5):
            results = both(problem.operands, first.handle, second.handle)
            for name, y in zip(("first", "second"), results, strict=True):
                assert_same_bits(y, expected, f"{name} Domain, run {run}")


def test_remade_domain_needs_no_recompilation(widest):
    problem = problem_at(widest)
    traced = []

    def layer(*args):
        traced.append(1)
        return apply_layer(mesh_of(widest.gpus), *args)[0]

    call, results = jax.jit(layer), []
    for _ in range(4):
        with domain_at(problem, widest) as domain:
            results.append(np.asarray(call(*problem.operands, domain.handle)))
    assert len(traced) == 1
    assert call._cache_size() == 1
    for again in results[1:]:
        assert_same_bits(again, results[0])


def test_many_domains_one_after_the_other(widest):
    """More than the directory has entries; memory and entries come back."""
    problem = problem_at(widest, tokens=2)
    call, first = jitted_layer(mesh_of(widest.gpus)), None
    for number in range(260 if IS_GPU else 20):
        with domain_at(problem, widest) as domain:
            if number % 50 == 0:
                y = np.asarray(call(*problem.operands, domain.handle)[0])
                first = y if first is None else first
                assert_same_bits(y, first, f"output of Domain {number}")


@over(Place(1, 2), Place(2, 1))
def test_generations_go_on(place):
    problem = problem_at(place, tokens=2)
    with domain_at(problem, place) as domain:
        call = jitted_layer(domain.mesh)
        operands = jax.device_put(problem.operands, NamedSharding(domain.mesh, P(AXIS)))
        first = np.asarray(call(*operands, domain.handle)[0])
        for _ in range(300):
            y, plan = call(*operands, domain.handle)
        assert_same_bits(y, first)
        assert plan.generation == 301
        domain.check()


def test_independent_calls_in_one_program_end(widest):
    """Calls that nothing orders are right, or fail with the remedy; they never mix nor hang."""
    problem = problem_at(widest)
    doubled = jax_iser.ExpertWeights(*problem.weights[:2], problem.weights.down * 2)
    mesh = mesh_of(widest.gpus)

    @jax.jit
    def both(x, ids, topk_weights, weights, doubled, handle):
        return [apply_layer(mesh, x, ids, topk_weights, w, handle) for w in (weights, doubled)]

    domain = domain_at(problem, widest, timeout_s=2.0, startup_timeout_s=2.0)
    expected, _ = run_layer(problem, domain=domain)
    outcome = "right"
    try:
        for _ in range(5):
            calls = both(*problem.operands[:3], problem.weights, doubled, domain.handle)
            for factor, (y, plan) in enumerate(calls, 1):
                if plan.status == 0:
                    assert_same_bits(y, expected * factor, f"call {factor}")
        domain.check()
    except (jax.errors.JaxRuntimeError, jax_iser.IserError) as error:
        outcome = str(error)
    domain.close(check=False)
    assert (
        outcome == "right"
        or re.search("IserError: .*use a Domain for each", outcome)
        or (not IS_GPU and "waited 2000 ms" in outcome)
    ), outcome


@over(*EIGHT)
def test_shared_expert(place):
    """Added once, whatever it takes; on f32 the sum of the two outputs as they are."""
    problem = problem_at(place)
    matrix = np.random.default_rng(6).standard_normal((68, 68)).astype(np.float32) / 8
    options = {"shared_expert": lambda x: jnp.tanh(x @ matrix)}
    with domain_at(problem, place) as domain:
        call = jitted_layer.__wrapped__
        results = []
        for balance in ({}, OFF):
            run = call(domain.mesh, **options, **balance)
            results.append(np.asarray(run(*problem.operands, domain.handle)[0]))
        plain, _ = run_layer(problem, domain=domain)
        tanh, _ = run_layer(problem, domain=domain, options={"shared_expert": jnp.tanh})
    assert_same_bits(results[0], results[1], "output with a product as shared expert")
    np.testing.assert_allclose(
        results[0] - plain,
        np.tanh(problem.x @ matrix),
        atol=5e-3,
        rtol=5e-3,  # TF32
    )
    np.testing.assert_allclose(tanh, plain + np.tanh(problem.x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sms", [None, 96, 128] if IS_GPU else [None])  # CPUs have no SMs
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shared_expert_with_a_budget(widest, dtype, sms):
    """cuBLAS with a budget of SMs computes the gated MLP, alone and beside the layer's copies."""
    rng = np.random.default_rng(7)
    problem = problem_at(widest, dtype=dtype, hidden=128, intermediate=192)
    shapes = ((256, 128), (256, 128), (128, 256))
    planes = [(rng.standard_normal(s) / s[1] ** 0.5).astype(problem.x.dtype) for s in shapes]

    def shared(x):
        return jax_iser.shared_expert(x, *planes, sms=sms)

    found = np.asarray(jax.jit(shared)(problem.x), np.float64)
    x, gate, up, down = (np.asarray(a, np.float64) for a in (problem.x, *planes))
    gated = x @ gate.T
    expected = (gated / (1 + np.exp(-gated)) * (x @ up.T)) @ down.T
    # TF32 has 10 bits, bfloat16 rounds the inner products to 8.
    np.testing.assert_allclose(found, expected, atol=5e-2, rtol=5e-2)
    with domain_at(problem, widest) as domain:
        results = []
        for balance in ({}, OFF):
            call = jitted_layer.__wrapped__(domain.mesh, shared_expert=shared, **balance)
            for _ in range(3):
                results.append(np.asarray(call(*problem.operands, domain.handle)[0]))
    for y in results[1:]:
        assert_same_bits(y, results[0])


def nnx_module(mesh, **options):
    sizes = {"num_experts": 16, "top_k": 2, "num_shared_experts": 1}
    return jax_iser.nnx.MoE(16, 24, **sizes, **options, mesh=mesh, rngs=nnx.Rngs(0))


@over(Place(1, 4), Place(2, 4))
def test_nnx_module(place):
    mesh, call = mesh_of(place.gpus), nnx.jit(lambda model, x: model(x))
    x = np.random.default_rng(0).standard_normal((2, 24, 16)).astype(np.float32)
    sizes = {"num_experts": 16, "top_k": 2, "hidden_size": 16, "intermediate_size": 24}
    tokens = 48 // place.num_ranks
    results = {}
    with jax_iser.Domain(
        mesh, AXIS, ranks_per_device=place.ranks_per_device, max_tokens_per_rank=tokens, **sizes
    ) as domain:
        for name in ("haloq", "none", "reference"):
            method = "reference" if name == "reference" else "fused"
            balance = "none" if name == "reference" else name
            model = nnx_module(mesh, balance=balance, method=method)
            jax_iser.nnx.attach(model, domain)
            results[name] = np.asarray(call(model, x))
    assert_same_bits(results["haloq"], results["none"])
    assert np.abs(results["none"]).max() > 1e-3
    # The reference's products are TF32 on GPUs.
    np.testing.assert_allclose(results["none"], results["reference"], atol=2e-2, rtol=2e-2)


def with_collectives(mesh, num_steps, balance):
    """Steps of layer, psum and all_gather in one loop; x of a step is made of what they gave."""

    def on_device(x0, ids, topk_weights, weights, handle):
        def step(_, carry):
            x, total, ranks, failures = carry
            y, plan = jax_iser.moe_layer(
                x, ids, topk_weights, weights, handle, shared_expert=jnp.tanh, balance=balance
            )
            everywhere = lax.all_gather(y, AXIS, tiled=True)
            start = (lax.axis_index(AXIS) + 1) * len(x) % len(everywhere)
            other = lax.dynamic_slice_in_dim(everywhere, start, len(x))
            total = lax.psum(y.astype(jnp.float32).sum(), AXIS)
            return (
                0.9 * x0 + 0.1 * jnp.clip(other, -4, 4),
                total,
                ranks + lax.psum(jnp.int32(1), AXIS),
                failures + (plan.status != 0),
            )

        carry = (x0, jnp.float32(0), jnp.int32(0), jnp.int32(0))
        x, total, ranks, failures = lax.fori_loop(0, num_steps, step, carry)
        return x, total[None], ranks[None], failures[None]

    return jax.jit(
        jax.shard_map(on_device, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)
    )


@pytest.mark.parametrize("engine", ["f32", "tensor"])
@over(*EIGHT)
def test_beside_native_collectives(place, engine):
    steps = 1000 if IS_GPU else 30
    problem = problem_at(place, engine=engine)
    with domain_at(problem, place) as domain:
        results = []
        for balance in ("none", "haloq"):
            call = with_collectives(domain.mesh, steps, balance)
            x, total, ranks, failures = call(*problem.operands, domain.handle)
            assert (np.asarray(failures) == 0).all()
            assert (np.asarray(ranks) == steps * place.gpus).all()
            assert np.isfinite(np.asarray(total, np.float32)).all()
            results.append(np.asarray(x))
        assert_same_bits(results[1], results[0], f"x after {steps} steps")
        one = with_collectives(domain.mesh, 1, "haloq")
        first = np.asarray(one(*problem.operands, domain.handle)[0])
        for run in range(30):
            x = one(*problem.operands, domain.handle)[0]
            assert_same_bits(x, first, f"x after a step, run {run}")
        domain.check()


@only_on_gpus
def test_time_of_the_cpu_is_not_kept(widest):
    with (
        domain_at(problem_at(widest), widest) as domain,
        pytest.raises(NotImplementedError, match=r"jax\.profiler"),
    ):
        domain.busy()


@over(*EIGHT)
def test_timelines_are_in_order(place):
    problem = problem_at(place)
    with domain_at(problem, place) as domain:
        for _ in range(3):
            run_layer(problem, domain=domain)
        try:
            calls = domain.timelines()
        except NotImplementedError as error:
            pytest.skip(str(error))
    assert sorted(t.generation for t in calls) == sorted([1, 2, 3] * place.gpus)
    for t in calls:
        assert t.started <= t.planned <= t.copy_begin <= t.copy_end, t
        assert t.started <= t.fused_called <= t.ready_seen <= t.finished, t
