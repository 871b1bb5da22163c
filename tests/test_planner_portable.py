"""HALO-Q in `jax.numpy` against its NumPy twin: the same bits for the same counts and routes."""

import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from layers import (
    AXIS,
    assert_same_bits,
    assert_same_plan,
    make_domain,
    make_problem,
    mesh_of,
    run_layer,
)
from plan_problems import FIXED, FIXED_DIGESTS, KNOBS, RANKS, fixed_counts, make_ids, random_counts

from jax_iser.layer import moe_layer
from jax_iser.methods.portable import layer as reference
from jax_iser.methods.portable import plan as portable
from jax_iser.plan import counts as planner
from jax_iser.plan import group_levels
from jax_iser.reference import planner as twin
from jax_iser.replay import workloads

KINDS = [*workloads.WORKLOADS, "sparse", "heavy", "ties", "skewed"]
# Each combination is a program to compile, so the knobs take turns.
SETS_OF_KNOBS = [
    (4, 4, 0, 0, "owner_direct"),
    (3, 1, 5, 1100, "per_slot"),
    (7, 2, 0, 1000, "sami"),
    (16, 1, 1, 0, "per_slot"),
    (1, 4, 40, 0, "per_slot"),
    (2, 2, 0, 2500, "owner_direct"),
]


@functools.cache
def jitted(function=portable.plan_counts, **knobs):
    return jax.jit(functools.partial(function, **knobs))


def assert_equal_plans(found, expected, what=""):
    for name in twin.CountsPlan._fields:
        value = np.asarray(getattr(expected, name), np.int32)
        assert_same_bits(getattr(found, name), value, f"{name} {what}")


def check_against_twin(counts, resident=None, **knobs):
    expected = twin.plan_counts(counts, resident=resident, **knobs)
    assert_equal_plans(jitted(**knobs)(counts, resident=resident), expected)
    return expected


@pytest.mark.parametrize("num_ranks", RANKS)
def test_equals_the_twin(num_ranks):
    first = RANKS.index(num_ranks)
    num_broadcasts = 0
    for turn, home in ((first, 5), (first + 3, 2)):
        knobs = dict(zip(KNOBS, SETS_OF_KNOBS[turn % len(SETS_OF_KNOBS)], strict=True))
        for seed, kind in enumerate(KINDS):
            counts = random_counts(num_ranks, home, kind, seed)
            num_broadcasts += check_against_twin(counts, **knobs).num_broadcasts
    assert num_broadcasts > 0 or num_ranks == 1


SHAPES = [(8, 4, *SETS_OF_KNOBS[3]), (6, 3, *SETS_OF_KNOBS[1]), (33, 2, *SETS_OF_KNOBS[4])]


@given(st.sampled_from(SHAPES), st.sampled_from(KINDS), st.integers(0, 2**32 - 1), st.booleans())
@settings(max_examples=80)
def test_equals_the_twin_on_random_counts(shape, kind, seed, with_resident):
    num_ranks, home, *values = shape
    counts, knobs = (
        random_counts(num_ranks, home, kind, seed),
        dict(zip(KNOBS, values, strict=True)),
    )
    size = (num_ranks, knobs["num_helper_slots"])
    resident = np.random.default_rng(seed).integers(-1, counts.shape[1], size, dtype=np.int32)
    check_against_twin(counts, resident=resident if with_resident else None, **knobs)


def largest_totals(num_ranks, home):
    """Counts of 2**31 - 1 routes in one cell, one row, one expert, and spread as evenly as can be,
    each with little else; and of as many less one."""
    shape, limit = (num_ranks, num_ranks * home), 2**31 - 1
    for total in (limit, limit - 1):
        cell = np.zeros(shape, np.int64)
        cell[-1, 0] = total
        yield cell
        noise = np.random.default_rng(1).integers(0, 9, shape)
        for part in (np.s_[0, :], np.s_[:, -1], np.s_[:, :]):
            counts = noise.copy()
            rest = total - int(counts.sum())
            counts[part] += rest // counts[part].size
            counts[0, -1] += total - int(counts.sum())
            yield counts


@pytest.mark.parametrize(("num_ranks", "home", "least"), [(4, 3, 1), (9, 2, 4), (72, 2, 1)])
def test_totals_up_to_the_largest(num_ranks, home, least):
    num_broadcasts = 0
    for counts in largest_totals(num_ranks, home):
        for threshold in (0, 1001):
            knobs = {"min_group_size": least, "gain_threshold": threshold, "copy_rule": "per_slot"}
            num_broadcasts += check_against_twin(counts, **knobs).num_broadcasts
    assert num_broadcasts > 8


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
@example(2**32 - 1, 2**32 - 1)
@example(2**16 - 1, 2**16 + 1)
def test_wide_products(a, b):
    high, low = portable._wide_product(np.uint32(a), np.uint32(b))
    assert (int(high) << 32) + int(low) == a * b


def test_gain_threshold_is_met_exactly():
    """1000 * P * max and g * sum are beyond 32 bits and differ in their last digits alone."""
    for num_ranks, heaviest in ((4, 10**9), (8, 2 * 10**8 + 1), (72, 29 * 10**6)):
        counts = np.zeros((num_ranks, num_ranks), np.int32)
        counts[0, 0], counts[0, 1] = heaviest, heaviest // 4 + 3
        before, total = counts.sum(axis=0), int(counts.sum(dtype=np.int64))
        exact = 1000 * num_ranks * heaviest // total
        for threshold in (exact, exact + 1):
            expected = 1000 * num_ranks * heaviest >= threshold * total
            assert bool(portable._gains(before, jnp.int32(total), threshold)) == expected
    before = jnp.array([3, 1], jnp.int32)  # 6000 of 4: met exactly at 1500
    assert bool(portable._gains(before, jnp.int32(4), 1500))
    assert not bool(portable._gains(before, jnp.int32(4), 1501))


@pytest.mark.parametrize("number", range(len(FIXED)))
def test_plans_stay_what_they_are_and_map_over_a_batch(number):
    num_ranks, home, *values = FIXED[number]
    counts = np.stack([fixed_counts(seed, num_ranks, home) for seed in range(25)])
    knobs = dict(zip(KNOBS, values, strict=True))
    plans = jax.jit(jax.vmap(functools.partial(portable.plan_counts, **knobs)))(counts)
    digest = hashlib.sha256()
    for seed in range(25):
        plan = jax.tree.map(lambda a, at=seed: a[at], plans)
        fields = (plan.broadcasts, plan.quota, plan.load_before, plan.load)
        for field in (*fields, [plan.num_broadcasts, plan.target]):
            digest.update(np.ascontiguousarray(field, "<i4").tobytes())
    assert digest.hexdigest()[:16] == FIXED_DIGESTS[number]


def test_x64_changes_nothing():
    ids = make_ids(8, 4, "W2", 3)
    counts = workloads.counts(ids, 32)
    with jax.enable_x64(True):
        plan = jax.jit(functools.partial(portable.plan_counts, copy_rule="per_slot"))(counts)
        slots = jax.jit(portable.rewrite, static_argnums=4)(ids[0], counts, plan, 0, 4)
    expected = twin.plan_counts(counts, copy_rule="per_slot")
    assert expected.num_broadcasts > 0
    assert_equal_plans(plan, expected)
    assert_same_bits(slots, twin.rewrite(ids[0], counts, expected, 0, 4))


def test_resident_marks_only_whole_groups_in_place():
    counts = random_counts(8, 4, "W2", 1)
    plan = twin.plan_counts(counts)
    table = np.full((8, 4), -1, np.int32)
    for expert, _, level, group, helper, _ in plan.broadcasts[: plan.num_broadcasts]:
        table[list(group_levels(8)[level].members(group)), helper] = expert
    assert (check_against_twin(counts, resident=table).broadcasts[:, 5] != 0).all()
    table[table == plan.broadcasts[0, 0]] = [-1, *[plan.broadcasts[0, 0]] * 3]
    assert check_against_twin(counts, resident=table).broadcasts[0, 5] == twin.OWNER_DIRECT


def test_a_group_that_an_outsider_exports_to_is_not_pure():
    """By hand: rank 0 exports twice to its own group, and rank 4 into it between the two."""
    counts = np.zeros((8, 16), np.int32)
    counts[:, 0], counts[:, 1], counts[:, 8] = 60, 50, 100
    counts[:, [10, 12, 14]] = 50
    plan = check_against_twin(counts, copy_rule="per_slot")
    assert plan.broadcasts[:3, 5].tolist() == [twin.OWNER_DIRECT, twin.SAMI, twin.SAMI]


def rewritten(ids, counts, num_slots, min_group_size):
    """Histograms and `route_slot`s of all ranks, `[P, E]` and `[P, tokens, K]`."""
    knobs = {"num_helper_slots": num_slots, "min_group_size": min_group_size}
    plan = portable.plan_counts(counts, **knobs)
    ranks = np.arange(len(counts), dtype=np.int32)
    slots = jax.vmap(lambda one, rank: portable.rewrite(one, counts, plan, rank, num_slots))
    return jax.vmap(lambda one: portable.histogram(one, counts.shape[1]))(ids), slots(ids, ranks)


@pytest.mark.parametrize(
    ("num_ranks", "keys"), [*((ranks, "packed") for ranks in RANKS), (6, "in pairs")]
)
def test_rewrite_equals_the_twin(num_ranks, keys, monkeypatch):
    if keys == "in pairs":
        monkeypatch.setattr(portable, "MAX_KEYS", 0)
    home, num_slots, least = ((3, 4, 4), (2, 2, 1), (4, 1, 2))[RANKS.index(num_ranks) % 3]
    call = jax.jit(lambda ids, counts: rewritten(ids, counts, num_slots, least))
    num_away = 0
    for seed, workload in enumerate(["W2", "W3", "W4", "W1"]):
        ids = make_ids(num_ranks, home, workload, seed)[:, :7]
        ids = np.pad(ids, ((0, 0), (0, 7 - ids.shape[1]), (0, 4 - ids.shape[2])), mode="wrap")
        counts = workloads.counts(ids, num_ranks * home)
        plan = twin.plan_counts(counts, num_helper_slots=num_slots, min_group_size=least)
        found_counts, slots = call(ids, counts)
        assert_same_bits(found_counts, counts, "counts")
        for rank in range(num_ranks):
            expected = twin.rewrite(ids[rank], counts, plan, rank, num_slots)
            assert_same_bits(slots[rank], expected, f"route_slot of rank {rank}")
            num_away += (expected % (home + num_slots) >= home).sum()
    assert num_away > 0 or num_ranks == 1


def test_rewrite_without_slots_or_routes():
    ids, counts = make_ids(4, 2, "W2", 1), np.ones((4, 8), np.int32)
    plan = portable.plan_counts(counts, num_helper_slots=0)
    expected = twin.rewrite(ids[1], counts, twin.plan_counts(counts, num_helper_slots=0), 1, 0)
    assert_same_bits(portable.rewrite(ids[1], counts, plan, 1, 0), expected)
    plan = portable.plan_counts(counts)
    assert portable.rewrite(ids[1, :0], counts, plan, 1, 4).shape == (0, ids.shape[2])


def test_programs_do_not_grow_with_ranks_or_experts():
    def size(num_ranks, num_experts):
        counts = jax.ShapeDtypeStruct((num_ranks, num_experts), np.int32)
        return str(jax.make_jaxpr(portable.plan_counts)(counts)).count(" = ")

    assert size(64, 1024) == size(8, 64)


@pytest.mark.parametrize(
    ("counts", "knobs", "text"),
    [
        (np.zeros((8, 20), np.int32), {}, "num_experts=20 is not divisible by the 8 ranks"),
        (np.zeros((73, 73), np.int32), {}, r"num_ranks=73 is outside 1\.\.72"),
        (np.zeros((4, 4), np.float32), {}, "float32 of shape"),
        (np.zeros(4, np.int32), {}, r"\[ranks, experts\]"),
        (np.zeros((4, 4), np.int32), {"num_helper_slots": 17}, "num_helper_slots=17"),
        (np.zeros((4, 4), np.int32), {"min_group_size": 3}, "min_group_size=3"),
        (np.zeros((4, 4), np.int32), {"copy_rule": "fast"}, "copy_rule='fast'"),
        (np.zeros((4, 4), np.int32), {"resident": np.zeros((4, 3), np.int32)}, r"\(4, 3\)"),
    ],
)
def test_bad_arguments(counts, knobs, text):
    with pytest.raises(ValueError, match=text):
        jax.eval_shape(functools.partial(portable.plan_counts, **knobs), counts)


def on_mesh(function, num_operands, **options):
    """The jitted function, mapped over eight devices; all operands and results differ by rank."""
    specs = {"in_specs": (P(AXIS),) * num_operands, "out_specs": P(AXIS)}
    return jax.jit(jax.shard_map(function, mesh=mesh_of(8), **specs, **options))


def test_the_layer_plans_on_the_device():
    """Every rank has the twin's plan under `shard_map` with its check, and no host is called."""
    problem = make_problem("W3", num_experts=32, top_k=4)

    def layer(*operands):
        _, plan = reference.moe_layer(*operands, axis_name=AXIS, min_group_size=2)
        return jax.tree.map(lambda a: a[None], plan)

    call = on_mesh(layer, 4)
    assert "callback" not in str(jax.make_jaxpr(call)(*problem.operands))
    found = call(*problem.operands)
    expected = twin.plan_counts(problem.counts, min_group_size=2)
    assert expected.num_broadcasts > 2
    ids = problem.topk_ids.reshape(8, -1, 4)
    for rank in range(8):
        for name in ("broadcasts", "quota", "num_broadcasts", "load_before", "load"):
            value = np.asarray(getattr(expected, name), np.int32)
            assert_same_bits(getattr(found, name)[rank], value, name)
        slots = twin.rewrite(ids[rank], problem.counts, expected, rank, 4)
        assert_same_bits(found.route_slot[rank], slots, f"route_slot of rank {rank}")


def test_the_layer_plans_for_every_knob_of_a_domain():
    problem = make_problem("W2", num_experts=32, top_k=4)
    knobs = {"min_routes": 12, "gain_threshold": 1100, "copy_rule": "per_slot", "min_group_size": 1}
    with make_domain(problem, ranks_per_device=2, **knobs) as domain:
        _, found = run_layer(problem, domain=domain, options={"method": "reference"})
    expected = planner.plan_counts(problem.counts, **knobs)
    assert expected.num_broadcasts > 0
    assert_same_plan(found, expected)
    ids = problem.topk_ids.reshape(8, -1, 4)
    slots = [twin.rewrite(ids[rank], problem.counts, expected, rank, 4) for rank in range(8)]
    assert_same_bits(found.route_slot.reshape(ids.shape), np.stack(slots))


def test_gradients_pass_a_planned_layer():
    problem = make_problem("W2", num_experts=16, top_k=2)

    def gradients(balance):
        def loss(x, ids, scales, weights):
            y, _ = moe_layer(
                x, ids, scales, weights, method="portable", axis_name=AXIS, balance=balance
            )
            return (y * y).sum()

        return on_mesh(jax.grad(loss, argnums=(0, 2, 3)), 4, check_vma=False)(*problem.operands)

    for found, expected in zip(
        jax.tree.leaves(gradients("haloq")), jax.tree.leaves(gradients("none")), strict=True
    ):
        assert_same_bits(found, expected)


def test_a_planned_layer_maps_over_a_batch():
    """`vmap` of the layer inside `shard_map`: each sample has its own plan."""
    problems = [make_problem(workload, num_experts=16) for workload in ("W1", "W2", "W0")]
    x, ids, scales = (
        np.stack([getattr(problem, name) for problem in problems], axis=1)
        for name in ("x", "topk_ids", "topk_weights")
    )

    def layer(x, ids, scales, weights):
        def one(*operands):
            return moe_layer(*operands, weights, method="portable", axis_name=AXIS)

        y, plan = jax.vmap(one, in_axes=1, out_axes=(1, 0))(x, ids, scales)
        return y, jax.tree.map(lambda a: a[None], plan)

    y, plans = on_mesh(layer, 4, check_vma=False)(x, ids, scales, problems[0].weights)
    for at, problem in enumerate(problems):
        expected = twin.plan_counts(problem.counts)
        assert_same_bits(plans.broadcasts[5, at], expected.broadcasts)
        slots = twin.rewrite(problem.topk_ids.reshape(8, -1, 2)[5], problem.counts, expected, 5, 4)
        assert_same_bits(plans.route_slot[5, at], slots)
    assert np.isfinite(y).all()


def test_more_routes_than_the_planner_counts_are_refused():
    knobs = {"num_helper_slots": 4, "min_group_size": 4}
    plan = functools.partial(
        reference._plan,
        num_experts=16,
        ranks_here=1,
        axis_name=AXIS,
        balance="haloq",
        knobs=knobs,
    )
    ids = jax.ShapeDtypeStruct((2**29, 4), np.int32)
    with pytest.raises(ValueError, match="2147483648 routes, the planner takes at most 2147483647"):
        jax.eval_shape(on_mesh(plan, 1), ids)
    portable.check_num_routes(2**31 - 1)
