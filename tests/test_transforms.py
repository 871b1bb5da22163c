"""The layer under JAX's transformations, and beside other programs."""

import re
import threading
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from layers import (
    AXIS,
    OFF,
    apply_layer,
    assert_same_bits,
    jitted_layer,
    make_domain,
    make_problem,
    mesh_of,
    run_layer,
    sum_after_layers,
)

import jax_iser
import jax_iser.nnx

NUM_LAYERS = 5


def stack_of_layers(mesh, x, topk_ids, topk_weights, weights, handle, **options):
    """A scan over stacked weights: `(x after all layers, loads [L, P])`."""

    def body(x, layer):
        y, plan = apply_layer(
            mesh, x, topk_ids, topk_weights, weights, handle, layer=layer, **options
        )
        return x + y, (plan.load, plan.num_broadcasts)

    return lax.scan(body, x, jnp.arange(NUM_LAYERS))


@pytest.fixture(scope="module")
def stacked():
    """Operands with stacked weights, and the result layer by layer with plain weights."""
    problem = make_problem("W2", num_experts=32, top_k=4, num_layers=NUM_LAYERS)
    with make_domain(problem, num_layers=NUM_LAYERS) as domain:
        x = problem.x
        for layer in range(NUM_LAYERS):
            weights = jax_iser.ExpertWeights(*(plane[layer] for plane in problem.weights.planes))
            y, _ = jitted_layer(domain.mesh, **OFF)(
                x, problem.topk_ids, problem.topk_weights, weights, domain.handle
            )
            x = x + y
    return problem, np.asarray(x)


def test_scan_over_stacked_weights(stacked):
    problem, expected = stacked
    with make_domain(problem, num_layers=NUM_LAYERS, poison=True) as domain:
        call = jax.jit(lambda *args: stack_of_layers(domain.mesh, *args))
        for _ in range(2):
            y, (load, count) = call(*problem.operands, domain.handle)
            assert_same_bits(y, expected)
            assert (np.asarray(count) > 0).all()
            assert (np.asarray(load).sum(axis=1) == problem.topk_ids.size).all()


def test_no_weight_slice_in_the_compiled_scan(stacked):
    """Nothing of a layer's size of weights is made in the loop: calls read the stack in place."""
    problem, _ = stacked
    with make_domain(problem, num_layers=NUM_LAYERS) as domain:
        sharding = NamedSharding(domain.mesh, P(None, AXIS))
        weights = jax.device_put(problem.weights, sharding)
        operands = (*problem.operands[:3], weights, domain.handle)
        text = (
            jax.jit(lambda *args: stack_of_layers(domain.mesh, *args))
            .lower(*operands)
            .compile()
            .as_text()
        )
        assert "jax_iser.start" in text
        assert "while" in text
        # One device has 4 of the 32 experts: planes of a layer [4, 48, 32] and [4, 32, 48].
        assert re.search(r"f32\[5,4,48,32\]", text), "the stack is not found: the test is blind"
        makers = weight_makers(text)
        assert not makers, "\n".join(makers)

        # The same search finds the slices where weights are a scan's xs.
        def sliced(x, ids, topk_weights, weights, handle):
            def body(x, layer_weights):
                y, _ = apply_layer(domain.mesh, x, ids, topk_weights, layer_weights, handle)
                return x + y, ()

            return lax.scan(body, x, weights)

        assert weight_makers(jax.jit(sliced).lower(*operands).compile().as_text())


def weight_makers(text) -> list[str]:
    """Instructions whose result is of the size of one layer's plane on a device."""
    shape = r"f32\[(?:1,)?4,(?:48,32|32,48)\]"
    return [line.strip() for line in text.splitlines() if re.search(rf"= {shape}", line)]


def test_remat_in_a_scan_with_gradients(stacked):
    """`jax.checkpoint` runs the layers again in the backward pass; all calls pair up."""
    problem, _ = stacked
    options = {"ranks_per_device": 4, "num_layers": NUM_LAYERS, "timeout_s": 20.0}
    with make_domain(problem, **options) as domain:
        totals = [partial(sum_after_layers, domain, problem, remat=r) for r in (False, True)]
        gradients = [jax.jit(jax.grad(total))(problem.x) for total in totals]
        assert_same_bits(*gradients)
        assert np.abs(gradients[0]).max() > 1e-3
        call = jitted_layer(domain.mesh, layer=2)
        call(*problem.operands, domain.handle)[0].block_until_ready()


def test_donated_operands():
    problem = make_problem("W2", num_experts=32, top_k=4)
    expected, _ = run_layer(problem)
    with make_domain(problem) as domain:
        sharding = NamedSharding(domain.mesh, P(AXIS))
        call = jax.jit(lambda *args: apply_layer(domain.mesh, *args)[0], donate_argnums=(0, 1, 2))
        for _ in range(3):
            operands = [jax.device_put(a.copy(), sharding) for a in problem.operands[:3]]
            y = call(*operands, problem.weights, domain.handle)
            assert_same_bits(y, expected)
        assert operands[0].is_deleted()


def test_donated_weights():
    """Owners may free their weights once the call has completed: replicas were read before."""
    problem = make_problem("W2", num_experts=32, top_k=4)
    expected, _ = run_layer(problem)

    def step(x, ids, topk_weights, weights, handle):
        y, _ = apply_layer(mesh_of(8), x, ids, topk_weights, weights, handle)
        return y, jax.tree.map(lambda plane: plane * 0 - 1, weights)

    call = jax.jit(step, donate_argnums=(3,))
    with make_domain(problem) as domain:
        for _ in range(3):
            weights = jax.device_put(
                jax.tree.map(np.copy, problem.weights), NamedSharding(domain.mesh, P(AXIS))
            )
            y, _ = call(*problem.operands[:3], weights, domain.handle)
            assert_same_bits(y, expected)


def test_beside_native_collectives():
    problem = make_problem("W2", num_experts=32, top_k=4)
    expected, _ = run_layer(problem)

    def on_device(x, ids, topk_weights, weights, handle):
        total = lax.psum(x.sum(), AXIS)
        y, _ = jax_iser.moe_layer(
            x + 0 * total,
            ids,
            topk_weights,
            weights,
            handle,
            shared_expert=lambda x: 0 * lax.psum(x, AXIS),
        )
        everywhere = lax.all_gather(y, AXIS, tiled=True)
        y, _ = jax_iser.moe_layer(
            x + 0 * everywhere[: x.shape[0]], ids, topk_weights, weights, handle, layer=1
        )
        return y, lax.psum(y.sum(), AXIS), everywhere

    call = jax.jit(
        jax.shard_map(
            on_device,
            mesh=mesh_of(8),
            in_specs=P(AXIS),
            out_specs=(P(AXIS), P(), P()),
            check_vma=False,
        )
    )
    with make_domain(problem, num_layers=2) as domain:
        for _ in range(5):
            y, total, everywhere = call(*problem.operands, domain.handle)
            assert_same_bits(y, expected)
            assert_same_bits(everywhere, expected)
            np.testing.assert_allclose(total, expected.sum(), rtol=1e-3, atol=1e-3)


def test_remade_domain_needs_no_recompilation():
    problem = make_problem("W2", num_experts=32, top_k=4)
    traced = []

    def layer(*args):
        traced.append(1)
        return apply_layer(mesh_of(8), *args)[0]

    call, results = jax.jit(layer), []
    for _ in range(3):
        with make_domain(problem) as domain:
            results.append(np.asarray(call(*problem.operands, domain.handle)))
    assert len(traced) == 1
    assert call._cache_size() == 1
    for again in results[1:]:
        assert_same_bits(again, results[0])


def test_two_domains_side_by_side():
    """One program uses two Domains at once, other programs one of them each."""
    problem = make_problem("W2", num_experts=32, top_k=4)
    other = make_problem("W3", num_experts=16, top_k=2, seed=1)
    expected, expected_other = run_layer(problem)[0], run_layer(other)[0]

    @jax.jit
    def both(operands, handle, other_operands, other_handle):
        return (
            apply_layer(mesh_of(8), *operands, handle)[0],
            apply_layer(mesh_of(8), *other_operands, other_handle)[0],
        )

    with make_domain(problem) as domain, make_domain(other) as other_domain:
        for _ in range(5):
            y, y_other = both(problem.operands, domain.handle, other.operands, other_domain.handle)
            assert_same_bits(y, expected)
            assert_same_bits(y_other, expected_other)
            assert_same_bits(run_layer(other, domain=other_domain)[0], expected_other)
            assert_same_bits(run_layer(problem, domain=domain)[0], expected)


def test_two_threads_on_one_domain():
    """Two threads run programs of their own; all results are right, and all calls end."""
    problems = [make_problem("W6", num_experts=32, top_k=4, seed=s, step=s) for s in range(2)]
    expected = [run_layer(problem)[0] for problem in problems]
    errors = []

    def work(index, domain):
        try:
            for _ in range(15):
                y, _ = run_layer(problems[index], domain=domain, options={"layer": index})
                assert_same_bits(y, expected[index], f"thread {index}")
        except BaseException as error:
            errors.append(error)

    with make_domain(problems[0], num_layers=2, timeout_s=30.0) as domain:
        threads = [threading.Thread(target=work, args=(i, domain)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=100)
            assert not thread.is_alive(), "a thread hangs"
        assert not errors, errors[0]


def test_independent_calls_in_one_program_end():
    """Calls that nothing orders are right, or fail with the remedy; they never mix nor hang."""
    problem = make_problem("W2", num_experts=32, top_k=4)
    doubled = jax_iser.ExpertWeights(problem.weights[0], problem.weights[1], problem.weights[2] * 2)
    expected, _ = run_layer(problem)

    @jax.jit
    def both(x, ids, topk_weights, weights, doubled, handle):
        return [
            apply_layer(mesh_of(8), x, ids, topk_weights, w, handle)[0] for w in (weights, doubled)
        ]

    domain = make_domain(problem, timeout_s=2.0, startup_timeout_s=2.0)
    operands = (*problem.operands[:3], problem.weights, doubled)
    try:
        for _ in range(10):
            once, twice = (np.asarray(y) for y in both(*operands, domain.handle))
            assert_same_bits(once, expected)
            assert_same_bits(twice, 2 * expected)
        outcome = "right"
    except jax.errors.JaxRuntimeError as error:
        outcome = str(error)
    domain.close(check=False)
    assert outcome == "right" or re.search(r"IserError: rank \d waited 2000 ms", outcome), outcome


def test_vmap_names_the_remedy():
    problem = make_problem("W2")
    with make_domain(problem) as domain:
        call = jax.vmap(
            lambda x: apply_layer(domain.mesh, x, *problem.operands[1:], domain.handle)[0]
        )
        with pytest.raises(NotImplementedError, match="fold the mapped axis into the tokens"):
            call(np.stack([problem.x, problem.x]))


# With more devices than cores, XLA runs some of them only after others have ended.
@pytest.mark.parametrize("ranks_per_device", [8, 4])
def test_copies_start_before_the_shared_expert_ends(ranks_per_device):
    problem = make_problem("W2", num_experts=32, top_k=4)
    matrix = np.eye(32, dtype=np.float32)

    def slow_shared_expert(x):
        """About a tenth of a second of work."""
        wide = jnp.tile(x, (16 * 8 // ranks_per_device, 1))
        return lax.fori_loop(0, 400, lambda _, h: jnp.tanh(h @ matrix), wide)[: x.shape[0]]

    with make_domain(problem, ranks_per_device=ranks_per_device) as domain:
        options = {"shared_expert": slow_shared_expert}
        for _ in range(2):
            run_layer(problem, domain=domain, options=options)
        calls = [t for t in domain.timelines() if t.generation == 2]
        assert len(calls) == 8 // ranks_per_device
        for t in calls:
            assert t.started <= t.planned <= t.copy_begin <= t.copy_end
            assert t.copy_begin < t.fused_called, "the copies waited for the shared expert"
            assert t.fused_called <= t.ready_seen <= t.finished <= time.monotonic_ns()


def nnx_domain(mesh):
    return jax_iser.Domain(
        mesh,
        AXIS,
        ranks_per_device=4,
        num_experts=16,
        top_k=2,
        hidden_size=16,
        intermediate_size=24,
        max_tokens_per_rank=6,
    )


def nnx_module(mesh, **options):
    sizes = {"num_experts": 16, "top_k": 2, "num_shared_experts": 1}
    return jax_iser.nnx.MoE(16, 24, **sizes, **options, mesh=mesh, rngs=nnx.Rngs(0))


def test_nnx_module():
    mesh, call = mesh_of(2), nnx.jit(lambda model, x: model(x))
    x = np.random.default_rng(0).standard_normal((2, 24, 16)).astype(np.float32)
    results = {}
    for balance in ("haloq", "none"):
        model = nnx_module(mesh, balance=balance)
        with nnx_domain(mesh) as domain:
            jax_iser.nnx.attach(model, domain)
            results[balance] = np.asarray(call(model, x))
    assert_same_bits(results["haloq"], results["none"])
    assert np.abs(results["none"]).max() > 1e-3


def test_nnx_gradients_of_fused_and_reference():
    mesh, gradients = mesh_of(2), []
    x = np.random.default_rng(0).standard_normal((2, 24, 16)).astype(np.float32)

    @nnx.jit
    def gradient(model, x, handle):
        return nnx.grad(lambda m: (m(x, domain=handle) ** 2).sum())(model)

    with nnx_domain(mesh) as domain:
        for options in ({"method": "fused"}, {"method": "reference", "balance": "none"}):
            found = gradient(nnx_module(mesh, **options), x, domain.handle)
            gradients.append(jax.tree.leaves(found))
    assert len(gradients[0]) == 7
    for fused, plain in zip(*gradients, strict=True):
        assert np.abs(plain).max() > 1e-4
        np.testing.assert_allclose(fused, plain, atol=1e-4, rtol=1e-3)
