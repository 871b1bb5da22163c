"""Stage 5, the slot of every route: by the book, in NumPy, and as the `plan` call gives it."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from layers import (
    AXIS,
    PLAN_KNOBS,
    assert_same_bits,
    assert_same_plan,
    make_domain,
    make_problem,
    mesh_of,
    run_plan,
)
from plan_problems import RANKS, make_ids

import jax_iser
from jax_iser.plan import counts as planner
from jax_iser.plan import group_levels
from jax_iser.reference import planner as twin
from jax_iser.replay import workloads


def rewrite_by_the_book(ids, counts, plan, num_slots, min_group_size):
    """Stage 5 of docs/planner.md, one route at a time: `route_slot` of `[P, tokens, K]`."""
    num_ranks, num_experts = counts.shape
    home = num_experts // num_ranks
    stride = home + num_slots
    levels = group_levels(num_ranks, min_group_size)
    slots = np.full(ids.shape, -1, np.int32)
    row_of = {int(plan.broadcasts[b, 0]): b for b in range(plan.num_broadcasts)}
    filled = np.zeros_like(plan.quota)  # of each host's quota
    surplus = []
    for rank in range(num_ranks):
        for at in np.ndindex(ids.shape[1:]):
            expert = int(ids[(rank, *at)])
            if not 0 <= expert < num_experts:
                continue
            if expert not in row_of:
                slots[(rank, *at)] = expert // home * stride + expert % home
                continue
            b = row_of[expert]
            if filled[b, rank] < plan.quota[b, rank]:
                filled[b, rank] += 1
                slots[(rank, *at)] = slot_on(plan.broadcasts[b], rank, home, stride)
            else:
                surplus.append((b, (rank, *at)))
    # Hosts keep their own routes first, so what a rank keeps is known before any surplus is placed.
    for b, at in surplus:
        host = next(r for r in range(num_ranks) if filled[b, r] < plan.quota[b, r])
        filled[b, host] += 1
        slots[at] = slot_on(plan.broadcasts[b], host, home, stride)
        assert host in {*levels[plan.broadcasts[b, 2]].members(plan.broadcasts[b, 3])} or (
            host == plan.broadcasts[b, 1]
        )
    np.testing.assert_array_equal(filled, plan.quota)
    return slots


def slot_on(broadcast, host, home, stride):
    expert, owner, _, _, helper, _ = broadcast
    return owner * stride + expert % home if host == owner else host * stride + home + helper


@given(
    st.sampled_from(RANKS),
    st.integers(1, 4),
    st.sampled_from(list(workloads.WORKLOADS)),
    st.sampled_from([0, 1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=60)
def test_every_route_goes_where_the_quotas_say(
    num_ranks, home, workload, num_slots, min_group_size, seed
):
    ids = make_ids(num_ranks, home, workload, seed)
    counts = workloads.counts(ids, num_ranks * home)
    plan = planner.plan_counts(counts, num_helper_slots=num_slots, min_group_size=min_group_size)
    expected = rewrite_by_the_book(ids, counts, plan, num_slots, min_group_size)
    for rank in range(num_ranks):
        assert_same_bits(
            twin.rewrite(ids[rank], counts, plan, rank, num_slots), expected[rank], f"rank {rank}"
        )
    is_valid = (ids >= 0) & (ids < num_ranks * home)
    np.testing.assert_array_equal(expected >= 0, is_valid)
    computed = expected[is_valid] // (home + num_slots)
    np.testing.assert_array_equal(np.bincount(computed, minlength=num_ranks), plan.load)
    source = np.broadcast_to(np.arange(num_ranks)[:, None, None], ids.shape)[is_valid]
    flow = np.zeros((num_ranks, num_ranks), np.int64)
    np.add.at(flow, (source, computed), 1)
    np.testing.assert_array_equal(twin.flow(counts, plan), flow)


def check_call(problem, *, ranks_per_device, **knobs):
    ids = problem.topk_ids.reshape(problem.num_ranks, -1, problem.topk_ids.shape[1])
    with make_domain(problem, ranks_per_device=ranks_per_device, **knobs) as domain:
        config, found = domain.config, run_plan(problem, domain=domain)
    options = {
        "num_helper_slots": config.num_helper_slots,
        "min_group_size": config.min_group_size,
        "min_routes": config.min_routes,
        "gain_threshold": config.gain_threshold,
        "copy_rule": config.copy_rule,
    }
    expected = twin.plan_counts(problem.counts, **options)
    for device in range(config.num_devices):
        assert_same_plan(jax.tree.map(lambda a, d=device: a[d], found), expected)
        assert found.status[device] == 0
        assert found.generation[device] == 1
    for rank in range(problem.num_ranks):
        slots = twin.rewrite(ids[rank], problem.counts, expected, rank, config.num_helper_slots)
        got = found.route_slot.reshape(problem.num_ranks, -1, ids.shape[-1])[rank]
        assert_same_bits(got, slots, f"route_slot of rank {rank}")
    return expected


@pytest.mark.parametrize("num_ranks", RANKS)
def test_call_equals_twin_with_ranks_on_one_device(num_ranks):
    problem = make_problem(
        "W3" if num_ranks % 2 else "W2",
        num_ranks=num_ranks,
        tokens=9,
        num_experts=2 * num_ranks,
        top_k=2,
        hidden=4,
        intermediate=4,
        seed=num_ranks,
    )
    plan = check_call(problem, ranks_per_device=num_ranks, min_group_size=2)
    assert plan.num_broadcasts > 0 or num_ranks == 1


@pytest.mark.parametrize("workload", workloads.WORKLOADS)
def test_call_equals_twin_on_eight_devices(workload):
    problem = make_problem(workload, num_experts=32, top_k=4, hidden=4, intermediate=4, step=1)
    check_call(problem, ranks_per_device=1)


@pytest.mark.parametrize("knobs", PLAN_KNOBS, ids=str)
def test_call_follows_the_knobs(knobs):
    problem = make_problem("W2", num_experts=32, top_k=4, hidden=4, intermediate=4)
    plan = check_call(problem, ranks_per_device=2, **knobs)
    nothing = knobs.get("num_helper_slots") == 0 or knobs.get("gain_threshold") == 9000
    assert (plan.num_broadcasts == 0) == nothing


def test_unbalanced_call_plans_nothing():
    problem = make_problem("W2")
    with make_domain(problem) as domain:

        def on_device(ids, handle):
            plan = jax_iser.plan(ids, handle, balance="none")
            return plan.num_broadcasts, plan.load, plan.load_before, plan.route_slot

        call = jax.shard_map(
            on_device,
            mesh=mesh_of(8),
            in_specs=(P(AXIS), P(AXIS)),
            out_specs=(P(), P(), P(), P(AXIS)),
            check_vma=False,
        )
        count, load, before, slots = jax.jit(call)(problem.topk_ids, domain.handle)
    assert count == 0
    np.testing.assert_array_equal(load, before)
    np.testing.assert_array_equal(slots, problem.topk_ids // 2 * 6 + problem.topk_ids % 2)
