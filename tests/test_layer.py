"""The layer against code that nobody here wrote, and its gradients."""

import doctest
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from layers import (
    AXIS,
    OFF,
    assert_same_plan,
    dense_numpy,
    jitted_layer,
    make_domain,
    make_problem,
    mesh_of,
    run_layer,
)

import jax_iser
from jax_iser.reference import planner as twin
from jax_iser.replay.workloads import WORKLOADS

# Sums of about a hundred products in another order, and one rounding of h and of each expert's
# output to the type: a few units in the last place of values of about one.
TOLERANCE = {"float32": 2e-5, "bfloat16": 4e-2}


def dense_einsum(x, topk_ids, topk_weights, weights):
    """All experts on all tokens; f32, differentiable, one device."""
    gate, up, down = (jnp.asarray(plane, jnp.float32) for plane in weights.planes)
    x32 = jnp.asarray(x, jnp.float32)
    h = jax.nn.silu(jnp.einsum("td,eid->tei", x32, gate)) * jnp.einsum("td,eid->tei", x32, up)
    one_hot = topk_ids[..., None] == jnp.arange(gate.shape[0])
    share = jnp.sum(jnp.where(one_hot, topk_weights[..., None], 0), axis=1)
    return jnp.einsum("tei,edi,te->td", h, down, share)


def ragged_dot(x, topk_ids, topk_weights, weights):
    """The layer as users write it today: routes sorted by expert, three `lax.ragged_dot`."""
    gate, up, down = (jnp.swapaxes(jnp.asarray(plane), 1, 2) for plane in weights.planes)
    tokens, top_k = topk_ids.shape
    order = jnp.argsort(topk_ids.reshape(-1), stable=True)
    sizes = jnp.bincount(topk_ids.reshape(-1), length=gate.shape[0]).astype(jnp.int32)
    rows = jnp.asarray(x)[order // top_k]
    f32 = {"preferred_element_type": jnp.float32}
    h = jax.nn.silu(lax.ragged_dot(rows, gate, sizes, **f32))
    h = (h * lax.ragged_dot(rows, up, sizes, **f32)).astype(rows.dtype)
    out = lax.ragged_dot(h, down, sizes, **f32).astype(rows.dtype)
    out = jnp.zeros_like(out).at[order].set(out).reshape(tokens, top_k, -1)
    return jnp.einsum("tkd,tk->td", out.astype(jnp.float32), topk_weights).astype(rows.dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("other", [dense_einsum, ragged_dot])
def test_against_other_code(other, dtype):
    problem = make_problem("W1", num_experts=32, top_k=4, hidden=96, intermediate=80, dtype=dtype)
    y, plan = run_layer(problem)
    assert plan.num_broadcasts > 0
    expected = np.asarray(other(*problem.operands), np.float64)
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_workload_against_f64(workload):
    problem = make_problem(workload, num_ranks=12, num_experts=24, top_k=3, step=1)
    y, _ = run_layer(problem, ranks_per_device=3, min_group_size=2)
    np.testing.assert_allclose(y, dense_numpy(problem), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_reference_method_agrees_and_shows_the_same_plan(dtype):
    problem = make_problem("W2", num_experts=32, top_k=4, dtype=dtype)
    with make_domain(problem) as domain:
        fused, plan = run_layer(problem, domain=domain)
        plain, shown = run_layer(problem, domain=domain, options={"method": "reference"})
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(
        np.asarray(fused, np.float64), np.asarray(plain, np.float64), atol=tolerance, rtol=tolerance
    )
    assert_same_plan(shown, plan)
    np.testing.assert_array_equal(shown.route_slot, plan.route_slot)


def test_plan_that_users_see_is_the_twins():
    problem = make_problem("W3", num_experts=32, top_k=4)
    with make_domain(problem, copy_rule="per_slot", min_group_size=2) as domain:
        _, plan = run_layer(problem, domain=domain)
        _, second = run_layer(problem, domain=domain)
    expected = twin.plan_counts(problem.counts, copy_rule="per_slot", min_group_size=2)
    assert_same_plan(plan, expected)
    assert plan.status == 0
    assert (plan.generation, second.generation) == (1, 2)


def test_shared_expert_is_added():
    problem = make_problem("W2")
    plain, _ = run_layer(problem)
    y, _ = run_layer(problem, options={"shared_expert": jnp.tanh})
    np.testing.assert_array_equal(y, plain + np.asarray(jnp.tanh(problem.x)))


def test_repeated_experts_of_a_token_count_twice():
    problem = make_problem("W0", top_k=3)
    problem.topk_ids[:, 1] = problem.topk_ids[:, 0]
    y, _ = run_layer(problem)
    np.testing.assert_allclose(y, dense_numpy(problem), atol=2e-5, rtol=2e-5)


def losses(problem, domain, method):
    """Scalar of (x, topk_weights, weights, V) through the layer and through dense einsums."""
    target = np.random.default_rng(5).standard_normal(problem.x.shape)

    def shared(matrix):
        return lambda x: jnp.tanh(x @ matrix)

    def of_layer(x, topk_weights, weights, matrix):
        options = {"method": method, "shared_expert": shared(matrix)}
        # Not cached: the shared expert closes over what is differentiated.
        y, _ = jitted_layer.__wrapped__(domain.mesh, **options)(
            x, problem.topk_ids, topk_weights, weights, domain.handle
        )
        return jnp.sum((y.astype(jnp.float32) - target) ** 2)

    def of_dense(x, topk_weights, weights, matrix):
        y = dense_einsum(x, problem.topk_ids, topk_weights, weights) + shared(matrix)(x)
        return jnp.sum((y - target) ** 2)

    return of_layer, of_dense


@pytest.mark.parametrize(
    ("method", "ranks_per_device"), [("fused", 1), ("fused", 8), ("reference", 4)]
)
def test_gradients(method, ranks_per_device):
    problem = make_problem("W2", top_k=3)
    problem.topk_ids[::5, 2] = -1
    matrix = np.random.default_rng(6).standard_normal((32, 32)).astype(np.float32) / 6
    x, _, topk_weights, weights = problem.operands
    with make_domain(problem, ranks_per_device=ranks_per_device) as domain:
        of_layer, of_dense = losses(problem, domain, method)
        arguments = (0, 1, 2, 3)
        of_layer = jax.jit(jax.value_and_grad(of_layer, arguments))
        value, found = of_layer(x, topk_weights, weights, matrix)
        np.testing.assert_allclose(value, of_dense(x, topk_weights, weights, matrix), rtol=1e-5)
        expected = jax.jit(jax.grad(of_dense, arguments))(x, topk_weights, weights, matrix)
        run_layer(problem, domain=domain)  # the Domain still works after a gradient
    names = ("x", "topk_weights", "gate", "up", "down", "matrix")
    for name, a, b in zip(names, jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        scale = float(np.abs(b).max())
        assert scale > 1e-3, f"the gradient of {name} is all but zero: nothing is tested"
        # Sums over 192 tokens, 3 routes and 48 columns in another order.
        np.testing.assert_allclose(a, b, atol=2e-5 * scale, rtol=2e-4, err_msg=name)


@pytest.mark.parametrize("wanted", ["x", "topk_weights", "weights", "matrix"])
def test_a_gradient_alone_leaves_no_call_behind(wanted):
    """Where only a gradient is used, `start` must not survive the `fused_moe` that XLA drops."""
    problem = make_problem("W2")
    matrix = np.eye(32, dtype=np.float32)
    operands = {
        "x": problem.x,
        "topk_weights": problem.topk_weights,
        "weights": problem.weights,
        "matrix": matrix,
    }
    with make_domain(problem, timeout_s=20.0) as domain:

        def total(value):
            at = operands | {wanted: value}
            y, _ = jitted_layer.__wrapped__(
                domain.mesh, shared_expert=lambda x: jnp.tanh(x @ at["matrix"])
            )(at["x"], problem.topk_ids, at["topk_weights"], at["weights"], domain.handle)
            return y.sum()

        gradient = jax.jit(jax.grad(total))
        first = gradient(operands[wanted])
        again = gradient(operands[wanted])
        assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), first, again))
        on, _ = run_layer(problem, domain=domain)
        off, _ = run_layer(problem, domain=domain, options=OFF)
        np.testing.assert_array_equal(on, off)


def test_gradient_without_the_name_of_the_axis():
    problem = make_problem("W2")
    with make_domain(problem) as domain:

        def on_device(x, ids, topk_weights, weights, handle):
            return jax_iser.moe_layer(x, ids, topk_weights, weights, handle)[0]

        def total(x):
            return jax.shard_map(
                on_device,
                mesh=mesh_of(8),
                in_specs=P(AXIS),
                out_specs=P(AXIS),
                check_vma=False,
            )(x, *problem.operands[1:], domain.handle).sum()

        with pytest.raises(
            ValueError,
            match="gradients over 8 devices need the name of their axis; pass axis_name=",
        ):
            jax.grad(total)(problem.x)


WITH_EXAMPLES = [
    "domain.domain",
    "experts.activation",
    "experts.bundle",
    "experts.formats",
    "experts.formats.float8_block128",
    "layer",
    "plan.counts",
    "plan.groups",
]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_in_docstrings(name):
    module = importlib.import_module(f"jax_iser.{name}")
    public = {each: getattr(jax_iser, each) for each in jax_iser.PUBLIC}
    names = {"jax_iser": jax_iser, **public, **vars(module), "jax": jax, "jnp": jnp}
    failed, tried = doctest.testmod(module, globs=names)
    assert tried
    assert not failed
