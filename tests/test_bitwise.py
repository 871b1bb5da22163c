"""The bitwise contract: outputs do not depend on the plan, on where ranks run, nor on tiles."""

import dataclasses
import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from layers import (
    OFF,
    assert_replicas,
    assert_same_bits,
    assert_same_plan,
    check_residents,
    dense_numpy,
    make_domain,
    make_problem,
    run_layer,
)

from jax_iser.replay.workloads import WORKLOADS

DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module", params=DTYPES)
def hot(request):
    """A problem with a hot rank, the outputs without replicas, and the plan with them."""
    problem = make_problem("W2", num_experts=32, top_k=4, dtype=request.param)
    with make_domain(problem, poison=True) as domain:
        expected, plan_off = run_layer(problem, domain=domain, options=OFF)
        _, plan = run_layer(problem, domain=domain)
    assert plan_off.num_broadcasts == 0
    assert plan.num_broadcasts > 0
    assert np.abs(np.asarray(expected, np.float32)).max() > 0.1
    return problem, expected, plan


def check(hot, **options):
    problem, expected, plan = hot
    y, found = run_layer(problem, poison=True, **options)
    assert_same_bits(y, expected)
    return found, plan


def test_output_is_right(hot):
    problem, expected, _ = hot
    # The output is a sum of top_k roundings to 24 or 8 bits of values of about its own size.
    tolerance = {"float32": 1e-5, "bfloat16": 3e-2}[str(problem.x.dtype)]
    np.testing.assert_allclose(
        np.asarray(expected, np.float64), dense_numpy(problem), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("ranks_per_device", [1, 2, 4, 8])
def test_devices_equal_ranks_per_device(hot, ranks_per_device):
    found, plan = check(hot, ranks_per_device=ranks_per_device)
    assert_same_plan(found, plan)
    assert_same_bits(found.route_slot, plan.route_slot, "route_slot")


@pytest.mark.parametrize(
    "knobs",
    [
        {"copy_rule": "sami"},
        {"copy_rule": "per_slot", "min_group_size": 1},
        {"num_helper_slots": 1},
        {"num_helper_slots": 16, "min_group_size": 1},
        {"num_helper_slots": 0},
        {"bank": "per_layer", "num_layers": 3},
        {"bank": "per_layer", "num_layers": 3, "resident": True},
        {"max_routes_per_rank": 1},
        {"max_routes_per_rank": 7},
        {"max_routes_per_rank": 40},
    ],
    ids=lambda knobs: ",".join(f"{k}={v}" for k, v in knobs.items()),
)
def test_knobs_change_no_bit(hot, knobs):
    check(hot, ranks_per_device=2, **knobs)


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("num_ranks", [1, 3, 6, 8, 33])
def test_on_equals_off(workload, num_ranks):
    problem = make_problem(
        workload,
        num_ranks=num_ranks,
        tokens=7,
        num_experts=3 * num_ranks,
        top_k=3,
        hidden=20,
        intermediate=12,
        step=1,
    )
    with make_domain(problem, ranks_per_device=num_ranks, min_group_size=1, poison=True) as domain:
        expected, _ = run_layer(problem, domain=domain, options=OFF)
        y, plan = run_layer(problem, domain=domain)
    assert_same_bits(y, expected)
    assert plan.load.max() <= max(plan.load_before.max(), -(-plan.load.sum() // num_ranks))
    assert np.isfinite(y).all()


def test_layers_of_one_domain_in_turn():
    """Both shared banks are used in turn by calls with other routes and weights."""
    problems = [make_problem("W6", num_experts=32, top_k=4, seed=s, step=s) for s in range(5)]
    with make_domain(problems[0], num_layers=2) as domain:
        for layer, problem in enumerate(problems * 2):
            on, plan = run_layer(problem, domain=domain, options={"layer": layer % 2})
            off, _ = run_layer(problem, domain=domain, options={"layer": layer % 2} | OFF)
            assert plan.num_broadcasts > 0
            assert_same_bits(on, off, f"output of call {layer}")


@pytest.mark.parametrize("copy_rule", ["owner_direct", "sami", "per_slot"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_replicas_are_their_experts(copy_rule, dtype):
    # Planes of 300 KiB (f32) make two slices of the copy.
    problem = make_problem(
        "W1", num_experts=32, top_k=4, tokens=8, hidden=150, intermediate=512, dtype=dtype
    )
    with make_domain(problem, copy_rule=copy_rule, num_layers=2) as domain:
        _, plan = run_layer(problem, domain=domain, options={"layer": 1})
        hows = plan.broadcasts[: plan.num_broadcasts, 5].tolist()
        assert set(hows) == {"owner_direct": {0}, "sami": {1}}.get(copy_rule, set(hows))
        assert assert_replicas(domain, problem, plan, layer=1) > 8


def test_residents_are_not_copied_again():
    """With changed weights but the same version a resident replica keeps the old bytes."""
    problem = make_problem("W2", num_experts=32, top_k=4)
    with make_domain(problem, resident=True, bank="per_layer", num_layers=2) as domain:
        check_residents(domain, problem)


def test_residents_of_another_version_are_forgotten_by_a_call_that_copies_nothing():
    """Its table starts empty: a later call must not find the old version's experts in it."""
    problem = make_problem("W2", num_experts=32, top_k=4)
    changed = dataclasses.replace(
        problem, weights=type(problem.weights)(*(plane + 1 for plane in problem.weights.planes))
    )
    ids = np.arange(problem.topk_ids.size, dtype=np.int32) % 32  # as many for every expert
    level = dataclasses.replace(changed, topk_ids=ids.reshape(problem.topk_ids.shape))
    with make_domain(problem, resident=True, bank="per_layer") as domain:
        assert run_layer(problem, domain=domain)[1].num_broadcasts > 0
        options = {"weights_version": 1}
        assert run_layer(level, domain=domain, options=options)[1].num_broadcasts == 0
        y, plan = run_layer(changed, domain=domain, options=options)
        assert (plan.broadcasts[: plan.num_broadcasts, 5] == 0).all()
        assert assert_replicas(domain, changed, plan) > 0
        assert_same_bits(y, run_layer(changed, domain=domain, options=options | OFF)[0])


def test_residents_survive_other_routes():
    """Plans that want other experts evict, and residency never shows old bytes for new."""
    with make_domain(
        make_problem("W6", num_experts=32, top_k=4), resident=True, bank="per_layer"
    ) as domain:
        ways = set()
        for step in (0, 0, 1, 1, 2, 0, 2):
            problem = make_problem("W6", num_experts=32, top_k=4, step=step)
            y, plan = run_layer(problem, domain=domain)
            assert_replicas(domain, problem, plan)
            ways |= set(plan.broadcasts[: plan.num_broadcasts, 5].tolist())
            assert_same_bits(y, run_layer(problem, domain=domain, options=OFF)[0], f"step {step}")
    assert ways == {0, 2}


def one_row_problem(position, num_rows, dtype):
    """Expert 0 gets `num_rows` rows from rank 0, the row of interest at `position` among them."""
    problem = make_problem(
        "W0", num_ranks=2, tokens=num_rows, num_experts=2, top_k=1, dtype=dtype, hidden=40
    )
    rng = np.random.default_rng(position)
    row = np.random.default_rng(99).standard_normal(40).astype(problem.x.dtype)
    problem.x[:] = rng.standard_normal(problem.x.shape).astype(problem.x.dtype)
    problem.x[position] = row
    problem.topk_weights[:] = 0.7
    problem.topk_ids[:] = -1
    problem.topk_ids[:num_rows] = 0
    return problem


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_row_through_every_position_and_tile(dtype):
    """400 rows make several tiles of one expert; the row keeps its bits wherever it stands."""
    problem = one_row_problem(0, 1, dtype)
    alone = run_layer(problem, ranks_per_device=2, options=OFF)[0][0]
    for num_rows in (400, 131):
        problem = one_row_problem(0, num_rows, dtype)
        row = problem.x[0].copy()
        with make_domain(problem, ranks_per_device=2) as domain:
            for position in range(0, num_rows, 1 if num_rows < 200 else 7):
                problem.x[0], problem.x[position] = problem.x[position].copy(), row
                y, _ = run_layer(problem, domain=domain, options=OFF)
                assert_same_bits(y[position], alone, f"row {position} of {num_rows}")
                problem.x[position], problem.x[0] = problem.x[0].copy(), row


PROGRAM = """
import hashlib
import os
import jax
from layers import make_domain, make_problem, run_layer
jax.block_until_ready(jax.device_put(0.0) + 1)  # XLA's threads are there from here on
before = len(os.listdir("/proc/self/task"))
make_domain(make_problem(), ranks_per_device=8).close()
print(len(os.listdir("/proc/self/task")) - before)  # the pool's, which outlive the Domain
digest = hashlib.sha256()
for dtype in ("float32", "bfloat16"):
    problem = make_problem("W2", num_experts=32, top_k=4, tokens=64, dtype=dtype)
    y, plan = run_layer(problem, ranks_per_device=2)
    assert plan.num_broadcasts > 0
    digest.update(y.tobytes())
print(digest.hexdigest())
"""


def test_thread_count_is_obeyed_and_changes_no_bit():
    digests = {}
    for threads in ("1", "2", "5"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "ISER_NUM_THREADS": threads},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        started, digests[threads] = done.stdout.split()
        assert started == threads, f"ISER_NUM_THREADS={threads}, but {started} threads were started"
    assert len(set(digests.values())) == 1, digests


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales", ["any", "with ties"])
def test_outputs_are_summed_in_k_order_and_rounded_once(dtype, scales):
    """To the bit, from each route's own output: `w0*y0 + w1*y1 + ...` in f32, then to nearest even.

    Scales of two bits often put a sum of bf16 values right between two of them.
    """
    problem = make_problem("W1", num_experts=32, top_k=4, dtype=dtype)
    rng = np.random.default_rng(3)
    shape = problem.topk_weights.shape
    some = rng.standard_normal(shape) if scales == "any" else rng.choice([0.75, 1.5, -3.0], shape)
    problem.topk_weights[:] = some.astype(np.float32)
    expected = np.zeros(problem.x.shape, np.float32)
    with make_domain(problem, ranks_per_device=2) as domain:
        for k in range(4):
            ids = np.where(np.arange(4) == k, problem.topk_ids, -1).astype(np.int32)
            ones = np.ones_like(problem.topk_weights)
            alone = dataclasses.replace(problem, topk_ids=ids, topk_weights=ones)
            y = run_layer(alone, domain=domain)[0].astype(np.float32)
            expected += problem.topk_weights[:, k : k + 1] * y
        y, _ = run_layer(problem, domain=domain)
    assert_same_bits(y, expected.astype(problem.x.dtype))


def test_poison_reaches_the_buffers():
    """The guard of all tests above: what no route writes stays NaN, and is never read."""
    problem = make_problem("W0", num_experts=16)
    problem.topk_ids[::3] = -1
    problem.topk_ids[1::3, 0] = 10_000
    y, _ = run_layer(problem, poison=True)
    assert np.isfinite(y).all()
    assert (y[::3] == 0).all()
    assert_same_bits(y, run_layer(problem)[0])
    assert jnp.dtype(y.dtype) == jnp.float32
