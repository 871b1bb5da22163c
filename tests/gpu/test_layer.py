"""The layer on GPUs: the same bits with and without replicas and wherever ranks are, and right."""

import functools

import jax
import numpy as np
import pytest
from gpu.on_gpus import (
    EIGHT,
    ENGINES,
    IS_GPU,
    TOLERANCE,
    Place,
    domain_at,
    layer_by_operand,
    outputs_by_position,
    over,
    problem_at,
)
from layers import (
    OFF,
    assert_replicas,
    assert_same_bits,
    assert_same_plan,
    check_residents,
    dense_numpy,
    make_problem,
    run_layer,
)

from jax_iser.replay.workloads import WORKLOADS

pytestmark = pytest.mark.gpu
engines = pytest.mark.parametrize("engine", ENGINES)


def assert_right(y, problem):
    """Close to the layer in f64."""
    tolerance = TOLERANCE[str(problem.x.dtype)]
    expected, y = dense_numpy(problem), np.asarray(y, np.float64)
    is_far = ~(np.abs(y - expected) <= tolerance * (1 + np.abs(expected)))
    if is_far.any():
        at = tuple(int(i) for i in np.argwhere(is_far)[0])
        raise AssertionError(
            f"{int(is_far.sum())} of {y.size} outputs, of {len(set(np.nonzero(is_far)[0]))} tokens "
            f"of {len(y)}, are off by more than {tolerance}, first at {at}: {y[at]}, expected "
            f"{expected[at]}; token {at[0]} has experts {problem.topk_ids[at[0]]}"
        )


def check_layer(problem, place, what="output", **knobs):
    """Off is right, and on has its bits; returns (outputs, plan with replicas)."""
    with domain_at(problem, place, **{"poison": True} | knobs) as domain:
        off, plan_off = run_layer(problem, domain=domain, options=OFF)
        on, plan = run_layer(problem, domain=domain)
        again, _ = run_layer(problem, domain=domain)
    assert (plan_off.status, plan_off.num_broadcasts, plan.status) == (0, 0, 0)
    assert_right(off, problem)
    assert_same_bits(on, off, f"{what} with replicas")
    assert_same_bits(again, off, f"{what} of a second call with replicas")
    assert plan.load.sum() == ((problem.topk_ids >= 0) & (problem.topk_ids < 32)).sum()
    return off, plan


@functools.cache
def usual(engine):
    """A problem with a hot rank, and its outputs without replicas on one GPU."""
    problem = problem_at(EIGHT[0], engine=engine)
    with domain_at(problem, EIGHT[0]) as domain:
        return problem, run_layer(problem, domain=domain, options=OFF)[0]


@engines
@over(Place(1, 1), Place(1, 2), Place(1, 4), Place(2, 1), Place(2, 2), *EIGHT)
def test_on_equals_off(place, engine):
    problem = problem_at(place, engine=engine)
    _, plan = check_layer(problem, place)
    assert (plan.num_broadcasts > 0) == (place.num_ranks > 1)


@engines
@over(EIGHT[1])
def test_two_gpus_equal_one(place, engine):
    problem, expected = usual(engine)
    with domain_at(problem, EIGHT[0]) as domain:
        one, plan_one = run_layer(problem, domain=domain)
    with domain_at(problem, place) as domain:
        two, plan_two = run_layer(problem, domain=domain)
    assert_same_bits(one, expected, "output on one GPU")
    assert_same_bits(two, expected, "output on two GPUs")
    assert_same_plan(plan_two, plan_one)
    assert_same_bits(plan_two.route_slot, plan_one.route_slot, "route_slot")


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("engine", ["f32", "tensor"])
@over(*EIGHT)
def test_workloads(place, engine, workload):
    problem = problem_at(place, workload, engine, step=3)
    _, plan = check_layer(problem, place, workload, min_group_size=2)
    assert plan.load.max() <= max(plan.load_before.max(), -(-plan.load.sum() // 8))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swiglu"])
@engines
@over(Place(1, 8))
def test_activations_and_biases(place, engine, activation):
    """Replicas bring their biases: without them some token would have other bits."""
    options = {"activation": activation, "has_biases": True}
    problem = problem_at(place, "W1", engine, **options)
    _, plan = check_layer(problem, place, f"{activation} with biases", min_group_size=1)
    assert plan.num_broadcasts > 0


def repeat_experts(problem):
    problem.topk_ids[:, 1] = problem.topk_ids[:, 0]


def pad_some(problem):
    problem.topk_ids[::3] = -1
    problem.topk_ids[1::3, 0] = 10_000
    problem.topk_ids[2::3, 3] = -(2**31)


def pad_all(problem):
    problem.topk_ids[:] = -1


def keep_one_rank(problem):
    """Only the last rank has tokens."""
    problem.topk_ids[: -len(problem.x) // 8] = 32


def send_all_to_one(problem):
    """Every route goes to one expert: most of its rows are computed by replicas."""
    problem.topk_ids[:] = 17


ROUTES = [repeat_experts, pad_some, pad_all, keep_one_rank, send_all_to_one]


@pytest.mark.parametrize("change", ROUTES)
@pytest.mark.parametrize("engine", ["f32", "tensor"])
def test_strange_routes(widest, engine, change):
    problem = problem_at(widest, "W2", engine)
    change(problem)
    y, _ = check_layer(problem, widest, change.__name__, min_group_size=2)
    unused = ((problem.topk_ids < 0) | (problem.topk_ids >= 32)).all(axis=1)
    assert (np.asarray(y, np.float32)[unused] == 0).all()


@pytest.mark.parametrize("engine", ["f32", "tensor"])
def test_no_tokens(engine):
    """On one GPU: jaxlib 0.11.2 crashes on empty arrays that are split over devices."""
    place = EIGHT[0]
    full, none = (problem_at(place, "W2", engine, tokens=tokens) for tokens in (24, 0))
    with domain_at(full, place) as domain:
        for problem in (none, full, none):
            y, plan = run_layer(problem, domain=domain)
            assert y.shape == problem.x.shape
            assert plan.status == 0
            assert plan.load.sum() == problem.topk_ids.size
    with domain_at(none, place, max_tokens_per_rank=0) as domain:
        assert run_layer(none, domain=domain)[1].status == 0


SIZES = {
    "least-f32": {"dtype": "float32", "hidden": 4, "intermediate": 4, "tokens": 1, "top_k": 1},
    "least-bf16": {"dtype": "bfloat16", "hidden": 8, "intermediate": 8, "tokens": 1, "top_k": 1},
    "least-tensor": {"dtype": "bfloat16", "hidden": 64, "intermediate": 64, "tokens": 1},
    "narrow": {"dtype": "float32", "hidden": 4, "intermediate": 1000, "tokens": 7},
    "odd-bf16": {"dtype": "bfloat16", "hidden": 520, "intermediate": 24, "tokens": 13},
    "wide-tensor": {"dtype": "bfloat16", "hidden": 1024, "intermediate": 64, "tokens": 9},
    "deep-tensor": {"dtype": "bfloat16", "hidden": 64, "intermediate": 1024, "tokens": 9},
    "all-experts": {"dtype": "bfloat16", "hidden": 64, "intermediate": 64, "top_k": 32},
    "tiles-f32": {"dtype": "float32", "hidden": 132, "intermediate": 148, "tokens": 130},
    "tiles-tensor": {
        "dtype": "bfloat16",
        "hidden": 320,
        "intermediate": 448,
        "tokens": 260 if IS_GPU else 100,
    },
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes(widest, name):
    check_layer(problem_at(widest, "W1", **SIZES[name]), widest, min_group_size=1)


@pytest.mark.parametrize("max_routes", [1, 40, 130])
@engines
def test_waves_change_no_bit(widest, engine, max_routes):
    problem, expected = usual(engine)
    with domain_at(problem, widest, max_routes_per_rank=max_routes) as domain:
        assert_same_bits(run_layer(problem, domain=domain)[0], expected)


KNOBS = [
    {"copy_rule": "sami"},
    {"copy_rule": "per_slot", "min_group_size": 1},
    {"num_helper_slots": 1},
    {"num_helper_slots": 16, "min_group_size": 1},
    {"num_helper_slots": 0},
    {"bank": "per_layer", "num_layers": 3},
    {"bank": "per_layer", "num_layers": 3, "resident": True},
    {"copy_sms": 1},
    {"copy_sms": 32},
]


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_knobs_change_no_bit(widest, knobs):
    if "copy_sms" in knobs and jax.default_backend() == "cpu":
        pytest.skip("copy_sms is for GPUs")
    for engine in ("f32", "tensor"):
        problem, expected = usual(engine)
        with domain_at(problem, widest, **knobs) as domain:
            for call in range(2):
                y, _ = run_layer(problem, domain=domain)
                assert_same_bits(y, expected, f"{engine}, call {call}")


def one_row_problem(num_rows, engine):
    """Expert 0 gets `num_rows` rows of rank 0, and rank 1 gives its tokens to no one."""
    sizes = ENGINES[engine]
    problem = make_problem("W0", num_ranks=2, tokens=num_rows, num_experts=2, top_k=1, **sizes)
    problem.topk_weights[:] = 0.7
    problem.topk_ids[:num_rows], problem.topk_ids[num_rows:] = 0, -1
    row = np.random.default_rng(99).standard_normal(sizes["hidden"])
    return problem, row.astype(problem.x.dtype)


@engines
def test_one_row_at_every_position(engine):
    """A row has its bits wherever it stands, however many rows its expert has."""
    place, found = Place(1, 2), {}
    for num_rows in (1, 131, 400):
        problem, row = one_row_problem(num_rows, engine)
        # The weights are drawn after as many numbers whatever the rows: the same for all.
        problem = problem.__class__(
            problem.x, problem.topk_ids, problem.topk_weights, weights_of(engine), 2
        )
        found |= outputs_by_position(problem, place, row, num_rows)
    for (num_rows, position), bits in found.items():
        assert_same_bits(bits, found[1, 0], f"row {position} of {num_rows}, against a row alone")


@functools.cache
def weights_of(engine):
    return one_row_problem(1, engine)[0].weights


@pytest.mark.parametrize("bank", ["shared", "per_layer"])
@pytest.mark.parametrize("copy_rule", ["owner_direct", "sami", "per_slot"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@over(*EIGHT)
def test_replicas_are_their_experts(place, dtype, copy_rule, bank):
    """Byte for byte, in both layers at once; planes are several slices of the copy."""
    sizes = {"dtype": dtype, "hidden": 152, "intermediate": 200, "num_layers": 2, "tokens": 8}
    problem = problem_at(place, "W1", **sizes)
    with domain_at(problem, place, copy_rule=copy_rule, bank=bank, num_layers=2) as domain:
        call, plans = layer_by_operand(domain.mesh), []
        for layer in (0, 1, 0):
            _, plan = call(np.int32(layer), *problem.operands, domain.handle)
            plans.append(jax.tree.map(np.asarray, plan))
            assert plans[-1].status == 0
        for layer in range(2):
            plan = plans[layer]
            hows = set(plan.broadcasts[: plan.num_broadcasts, 5].tolist())
            assert hows == {"owner_direct": {0}, "sami": {1}}.get(copy_rule, hows)
            count = assert_replicas(domain, problem, plan, layer, weights_layer=layer)
            assert count > 8, f"only {count} replicas: little is tested"


def test_residents_are_not_copied_again(widest):
    """With other weights of the same version a resident replica keeps the old bytes."""
    problem = problem_at(widest, "W2")
    with domain_at(problem, widest, resident=True, bank="per_layer", num_layers=2) as domain:
        check_residents(domain, problem)


@pytest.mark.parametrize("ranks", [24, 33, 72])
def test_many_ranks_on_one_gpu(ranks):
    place = Place(1, ranks)
    problem = problem_at(place, "W2", tokens=5, num_experts=2 * ranks, top_k=3)
    with domain_at(problem, place, min_group_size=1) as domain:
        off, _ = run_layer(problem, domain=domain, options=OFF)
        on, plan = run_layer(problem, domain=domain)
        assert assert_replicas(domain, problem, plan) > 0
    assert_same_bits(on, off)
    assert_right(off, problem)
