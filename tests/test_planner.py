"""HALO-Q's invariants, and its NumPy and C++ versions against each other (DESIGN: the plan)."""

import hashlib
import inspect

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from layers import assert_same_plan
from plan_problems import FIXED, FIXED_DIGESTS, KNOBS, RANKS, cases, fixed_counts, random_counts

from jax_iser.domain import DomainConfig
from jax_iser.plan import counts as planner
from jax_iser.plan import group_levels
from jax_iser.reference import planner as twin
from jax_iser.replay import workloads
from jax_iser.replay.policies.haloq import HaloQ


def rows_of(plan):
    """The broadcasts in use as tuples, each with its quota row."""
    return [
        (*(int(v) for v in plan.broadcasts[b]), plan.quota[b].astype(np.int64))
        for b in range(plan.num_broadcasts)
    ]


def check_invariants(counts, plan, knobs):
    num_ranks, num_experts = counts.shape
    num_slots = knobs["num_helper_slots"]
    home = num_experts // num_ranks
    totals = counts.sum(axis=0, dtype=np.int64)
    before = totals.reshape(num_ranks, home).sum(axis=1)
    levels = group_levels(num_ranks, knobs["min_group_size"])
    assert plan.target == -(-int(totals.sum()) // num_ranks)
    np.testing.assert_array_equal(plan.load_before, before)
    assert (plan.load <= np.maximum(plan.target, before)).all()
    assert plan.load.sum(dtype=np.int64) == totals.sum()

    occupied = set()
    load = before.copy()
    for expert, owner, level, group, helper, how, quota in rows_of(plan):
        members = levels[level].members(group)
        assert owner == expert // home
        assert 0 <= helper < num_slots
        assert how in (0, 1, 2)
        for rank in members:
            assert (rank, helper) not in occupied, "two broadcasts share a slot"
            occupied.add((rank, helper))
        hosts = {*members, owner}
        assert all(quota[r] == 0 for r in range(num_ranks) if r not in hosts)
        assert (quota >= 0).all()
        assert quota.sum() == totals[expert]
        moved = totals[expert] - quota[owner]
        assert moved >= max(1, knobs["min_routes"])
        load[owner] -= totals[expert]
        load += quota
    # Routes are conserved: the loads are exactly what the quotas say.
    np.testing.assert_array_equal(load, plan.load)
    experts = [row[0] for row in rows_of(plan)]
    assert len(set(experts)) == len(experts), "an expert is exported twice"
    exports = np.bincount([row[1] for row in rows_of(plan)], minlength=num_ranks)
    assert (exports <= min(num_slots, home)).all()
    received = np.bincount([rank for rank, _ in occupied], minlength=num_ranks)
    assert (received <= num_slots).all()
    unused = slice(plan.num_broadcasts, None)
    assert (plan.broadcasts[unused] == -1).all()
    assert (plan.quota[unused] == 0).all()
    threshold = knobs["gain_threshold"]
    if num_slots == 0 or before.max() <= plan.target:
        assert plan.num_broadcasts == 0
    if 1000 * num_ranks * int(before.max()) < threshold * int(totals.sum()):
        assert plan.num_broadcasts == 0


@given(cases())
@settings(max_examples=120)
def test_invariants(case):
    counts, knobs = case
    check_invariants(counts, planner.plan_counts(counts, **knobs), knobs)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("workload", workloads.WORKLOADS)
def test_invariants_on_workloads(workload, num_ranks):
    for seed in range(3):
        counts = random_counts(num_ranks, 4, workload, seed)
        for min_group_size in (4, 1):
            knobs = dict.fromkeys(KNOBS, 0) | {
                "num_helper_slots": 4,
                "min_group_size": min_group_size,
                "copy_rule": "per_slot",
            }
            check_invariants(counts, planner.plan_counts(counts, **knobs), knobs)


@given(cases(), st.integers(0, 2**32 - 1))
@settings(max_examples=80)
@example((np.array([[90, 10, 10, 10]] * 4, np.int32), {"min_group_size": 1}), 0)
def test_numpy_equals_cpp(case, seed):
    counts, knobs = case
    num_slots = knobs.get("num_helper_slots", 4)
    rng = np.random.default_rng(seed)
    resident = rng.integers(-1, counts.shape[1], (counts.shape[0], num_slots), dtype=np.int32)
    for table in (None, resident):
        expected = twin.plan_counts(counts, resident=table, **knobs)
        found = planner.plan_counts(counts, resident=table, **knobs)
        assert found.target == expected.target
        assert_same_plan(found, expected)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_plan_many_equals_plan_counts(num_ranks):
    kinds = [*workloads.WORKLOADS, "ties"]
    counts = np.stack([random_counts(num_ranks, 3, kind, 7) for kind in kinds])
    batch = planner.plan_many(counts, with_flow=True, num_threads=2, min_group_size=2)
    for n, one in enumerate(counts):
        plan = planner.plan_counts(one, min_group_size=2)
        assert_same_plan(
            twin.CountsPlan(*(getattr(batch, name)[n] for name in twin.CountsPlan._fields)), plan
        )
        assert batch.target[n] == plan.target
        np.testing.assert_array_equal(batch.flow[n], twin.flow(one, plan))
        np.testing.assert_array_equal(batch.flow[n].sum(axis=0), plan.load)
        np.testing.assert_array_equal(batch.flow[n].sum(axis=1), one.sum(axis=1))


@given(cases(ranks=(2, 3, 4, 6, 8, 24, 33)))
@settings(max_examples=60)
def test_repair_leaves_loads_and_keeps_more_at_home(case):
    counts, knobs = case
    plan = planner.plan_counts(counts, **knobs)
    totals = counts.sum(axis=0, dtype=np.int64)
    before = totals.reshape(len(counts), -1).sum(axis=1)
    if not plan.num_broadcasts:
        return
    levels = group_levels(len(counts), knobs["min_group_size"])
    broadcasts, quotas, load = twin.place(
        totals, before, knobs["num_helper_slots"], levels, plan.target, knobs["min_routes"]
    )
    np.testing.assert_array_equal(plan.load, load)
    local = 0
    for row, (placed, quota) in zip(
        rows_of(plan), zip(broadcasts, quotas, strict=True), strict=True
    ):
        assert row[:4] == (placed.expert, placed.owner, placed.level, placed.group)
        assert row[-1].sum() == quota.sum()
        source = counts[:, row[0]]
        local += int(np.minimum(source, row[-1]).sum() - np.minimum(source, quota).sum())
    assert local >= 0, "repair moved routes away from their source"


def pairs_by_the_book(num_ranks):
    """The rings of stage 4 in docs/planner.md, from its text."""
    n = num_ranks + num_ranks % 2
    for t in range(n - 1):
        ring = [n - 1] + [(t + j) % (n - 1) for j in range(n - 1)]
        yield [(ring[i], ring[n - 1 - i]) for i in range(n // 2)]


@pytest.mark.parametrize("num_ranks", [r for r in RANKS if r > 1])
def test_tournament_meets_every_pair_once(num_ranks):
    met = [tuple(sorted(pair)) for pair in twin.tournament(num_ranks)]
    assert len(met) == len(set(met)) == num_ranks * (num_ranks - 1) // 2
    book = [p for ring in pairs_by_the_book(num_ranks) for p in ring if max(p) < num_ranks]
    assert list(twin.tournament(num_ranks)) == book
    for ring in pairs_by_the_book(num_ranks):
        flat = [rank for pair in ring for rank in pair]
        assert len(flat) == len(set(flat))


def test_worked_example():
    """By hand: T = 150; rank 0 holds 360, of it expert 0 180, expert 1 100, expert 2 80."""
    counts = np.zeros((4, 12), np.int32)
    counts[:, :3] = 45, 25, 20
    counts[:, 3], counts[:, 6], counts[:, 9] = 30, 15, 15
    knobs = {"min_group_size": 2, "copy_rule": "per_slot"}
    plan = planner.plan_counts(counts, num_helper_slots=1, **knobs)
    # m = min(210, 180): the group of ranks 2 and 3 has room 90 + 90, all of it, and is finest.
    assert plan.target == 150
    assert plan.num_broadcasts == 1
    assert plan.broadcasts[0].tolist() == [0, 0, 1, 1, 0, 1]
    assert plan.load.tolist() == [180, 120, 150, 150]
    # The owner keeps none; each member keeps its own 45 and takes half of the rest.
    assert plan.quota[0].tolist() == [0, 0, 90, 90]
    plan = planner.plan_counts(counts, num_helper_slots=2, **knobs)
    # Expert 1: m = min(30, 100); no room is left in ranks 2 and 3, 30 in ranks 0 and 1.
    assert plan.num_broadcasts == 2
    assert plan.broadcasts[1].tolist() == [1, 0, 1, 0, 0, 0]
    assert plan.quota[1].tolist() == [70, 30, 0, 0]
    assert plan.load.tolist() == [150, 150, 150, 150]


def test_ties_go_to_the_lower_index():
    counts = np.zeros((8, 16), np.int32)
    counts[:, 0], counts[:, 1], counts[:, 14], counts[:, 15] = 5, 5, 5, 5
    plan = planner.plan_counts(counts, num_helper_slots=1, min_group_size=4)
    # Ranks 0 and 7 have 80 each; rank 0 is first, its expert 0 before 1; both groups have room for
    # T = 20 a rank: the lower one has three members below it (60), the upper one too.
    assert plan.broadcasts[0, :4].tolist() == [0, 0, 1, 0]
    assert plan.broadcasts[1, :4].tolist() == [14, 7, 1, 1]
    # Coldest first, ties to the lower rank: 40 routes fill ranks 1 and 2, then 4 and 5.
    assert plan.load.tolist() == [40, 20, 20, 0, 20, 20, 0, 40]


@pytest.mark.parametrize("plan_counts", [planner.plan_counts, twin.plan_counts])
@pytest.mark.parametrize("number", range(len(FIXED)))
def test_plans_stay_what_they_are(number, plan_counts):
    """Faults that both versions share show here: in ties, in the order of trades, in rounding."""
    num_ranks, home, *values = FIXED[number]
    digest, num_broadcasts = hashlib.sha256(), 0
    for seed in range(25):
        counts = fixed_counts(seed, num_ranks, home)
        plan = plan_counts(counts, **dict(zip(KNOBS, values, strict=True)))
        fields = (plan.broadcasts, plan.quota, plan.load_before, plan.load)
        for field in (*fields, [plan.num_broadcasts, plan.target]):
            digest.update(np.ascontiguousarray(field, "<i4").tobytes())
        num_broadcasts += plan.num_broadcasts
    assert num_broadcasts > 25
    assert digest.hexdigest()[:16] == FIXED_DIGESTS[number]


def test_nothing_above_the_water_level():
    counts = np.full((8, 16), 3, np.int32)
    counts[0, 0] += 1  # 385 routes: T = 49 = the heaviest load
    for table in (counts, np.zeros_like(counts)):
        plan = planner.plan_counts(table)
        assert plan.num_broadcasts == 0
        np.testing.assert_array_equal(plan.load, plan.load_before)


def test_min_routes_skips_a_placement_but_not_the_next():
    counts = np.tile(np.array([28, 10, 50, 12], np.int32), (4, 1))  # T = 100
    assert [r[0] for r in rows_of(planner.plan_counts(counts, min_group_size=1))] == [2, 0]
    for min_routes, experts in ((12, [2, 0]), (13, [2]), (101, [])):
        plan = planner.plan_counts(counts, min_group_size=1, min_routes=min_routes)
        assert [r[0] for r in rows_of(plan)] == experts


def test_gain_threshold_is_in_thousandths():
    counts = np.full((4, 4), 10, np.int32)
    counts[:, 0] = 15  # R = 60 / 45 = 1.333...
    assert planner.plan_counts(counts, gain_threshold=1333, min_group_size=1).num_broadcasts
    assert not planner.plan_counts(counts, gain_threshold=1334, min_group_size=1).num_broadcasts
    counts[:, 0] = 30  # R = 120 / 60 = 2, to the thousandth
    assert planner.plan_counts(counts, gain_threshold=2000, min_group_size=1).num_broadcasts
    assert not planner.plan_counts(counts, gain_threshold=2001, min_group_size=1).num_broadcasts


def test_resident_marks_only_whole_groups_in_place():
    counts = random_counts(8, 4, "W2", 1)
    plan = planner.plan_counts(counts)
    table = np.full((8, 4), -1, np.int32)
    levels = group_levels(8)
    for row in rows_of(plan):
        table[list(levels[row[2]].members(row[3])), row[4]] = row[0]
    held = planner.plan_counts(counts, resident=table)
    assert {row[5] for row in rows_of(held)} == {twin.RESIDENT}
    assert_same_plan(held, plan, ("quota", "load", "num_broadcasts"))
    first = rows_of(plan)[0]
    table[levels[first[2]].members(first[3])[-1], first[4]] = -1
    partly = planner.plan_counts(counts, resident=table)
    assert partly.broadcasts[0, 5] != twin.RESIDENT
    assert (partly.broadcasts[1 : plan.num_broadcasts, 5] == twin.RESIDENT).all()


def test_copy_rules():
    counts = random_counts(8, 4, "W1", 5)
    assert {r[5] for r in rows_of(planner.plan_counts(counts, copy_rule="sami"))} == {1}
    assert {r[5] for r in rows_of(planner.plan_counts(counts, copy_rule="owner_direct"))} == {0}
    for row in rows_of(planner.plan_counts(counts, copy_rule="per_slot")):
        if row[1] not in group_levels(8)[row[2]].members(row[3]):
            assert row[5] == twin.SAMI


def copy_ways_by_the_book(plan, num_ranks, min_group_size):
    """How `per_slot` copies each broadcast, from the text of docs/planner.md, and whether one of
    the ways hangs on the order of placement."""
    levels, rows = group_levels(num_ranks, min_group_size), rows_of(plan)
    groups = [frozenset(levels[row[2]].members(row[3])) for row in rows]
    owners = [row[1] for row in rows]
    ways, tied = [], set()
    for i, (group, owner) in enumerate(zip(groups, owners, strict=True)):
        meets = [j for j in range(len(rows)) if group & groups[j]]
        is_pure = all(groups[j] == group and owners[j] in group for j in meets)
        inside = [j for j in range(len(rows)) if owners[j] == owner and owner in groups[j]]
        widest = max((len(groups[j]) for j in inside), default=0)
        first = [j for j in inside if len(groups[j]) == widest][:1]
        is_direct = owner in group and (is_pure or first == [i])
        ways.append(twin.OWNER_DIRECT if is_direct else twin.SAMI)
        if owner in group and not is_pure and len(group) == widest:
            tied.add((owner, i))
    return ways, len(tied) > len({owner for owner, _ in tied})


@pytest.mark.parametrize("plan_counts", [planner.plan_counts, twin.plan_counts])
def test_per_slot_follows_the_book(plan_counts):
    """Of an owner's widest broadcasts into groups with it the first placed is owner-direct."""
    num_tied, ways_seen = 0, set()
    for seed in range(40):
        num_ranks, min_group_size = ((8, 4), (8, 1), (16, 2), (6, 1))[seed % 4]
        counts = random_counts(
            num_ranks, 4, ("W1", "W2", "W3", "skewed", "ties")[seed // 4 % 5], seed
        )
        plan = plan_counts(counts, min_group_size=min_group_size, copy_rule="per_slot")
        expected, is_tied = copy_ways_by_the_book(plan, num_ranks, min_group_size)
        assert [row[5] for row in rows_of(plan)] == expected, f"seed {seed}"
        num_tied += is_tied
        ways_seen |= set(expected)
    assert num_tied > 3, "no tie is tested"
    assert ways_seen == {twin.OWNER_DIRECT, twin.SAMI}


@pytest.mark.parametrize("plan_counts", [planner.plan_counts, twin.plan_counts])
def test_a_group_that_an_outsider_exports_to_is_not_pure(plan_counts):
    """By hand, in units of 8 routes: T = 45, and the upper four ranks have no room."""
    counts = np.zeros((8, 16), np.int32)
    counts[:, 0], counts[:, 1], counts[:, 8] = 60, 50, 100  # of ranks 0, 0 and 4
    counts[:, [10, 12, 14]] = 50
    rows = rows_of(plan_counts(counts, copy_rule="per_slot"))
    assert [row[:4] for row in rows[:3]] == [(0, 0, 1, 0), (8, 4, 1, 0), (1, 0, 1, 0)]
    # Both of rank 0 go to its own group; the first is its widest, the second would have to be pure.
    assert [row[5] for row in rows[:3]] == [twin.OWNER_DIRECT, twin.SAMI, twin.SAMI]


def test_the_default_copy_rule_is_a_domains():
    default = DomainConfig.copy_rule
    for function in (planner.plan_counts, planner.plan_many, twin.plan_counts):
        assert inspect.signature(function).parameters["copy_rule"].default == default
    assert HaloQ.copy_rule == default


@pytest.mark.parametrize(
    ("counts", "knobs", "text"),
    [
        (np.zeros((8, 20), np.int32), {}, "num_experts=20 is not divisible by the 8 ranks"),
        (np.zeros((73, 73), np.int32), {}, r"num_ranks=73 is outside 1\.\.72"),
        (np.zeros((1, 1025), np.int32), {}, r"num_experts=1025 is outside 1\.\.1024"),
        (np.zeros((4, 4)), {}, "float64 of shape"),
        (np.zeros(4, np.int32), {}, r"\[ranks, experts\]"),
        (np.full((2, 2), -1), {}, "-1"),
        (np.full((2, 2), 2**30), {}, "2147483647"),
        (np.zeros((4, 4), np.int32), {"num_helper_slots": 17}, "num_helper_slots=17"),
        (np.zeros((4, 4), np.int32), {"min_group_size": 3}, "min_group_size=3"),
        (np.zeros((4, 4), np.int32), {"min_routes": -1}, "min_routes=-1"),
        (np.zeros((4, 4), np.int32), {"gain_threshold": -5}, "gain_threshold=-5"),
        (np.zeros((4, 4), np.int32), {"copy_rule": "fast"}, "copy_rule='fast'"),
        (np.zeros((4, 4), np.int32), {"resident": np.zeros((4, 3), np.int32)}, r"\(4, 3\)"),
    ],
)
@pytest.mark.parametrize("plan_counts", [planner.plan_counts, twin.plan_counts])
def test_bad_arguments(plan_counts, counts, knobs, text):
    with pytest.raises(ValueError, match=text):
        plan_counts(counts, **knobs)
