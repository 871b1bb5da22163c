"""What must hold of every policy, and what is particular to each."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_helpers import make_counts

from jax_iser.reference import planner as reference
from jax_iser.replay.batch import Batch, Outcome, loads_of, local_routes
from jax_iser.replay.policies import POLICIES, parse_policy
from jax_iser.replay.policies.static import home_placement, place_static, split_static
from jax_iser.replay.split import even_split

VARIANTS = [
    *POLICIES,
    "haloq:min_group_size=1",
    "haloq:min_routes=9",
    "haloq:gain_threshold=1300",
    "haloq:resident=1",
    "haloq:copy_rule=sami",
    "haloq-owner:min_group_size=2",
    "all-rank:choose=rank",
    "p2p-capped:copies_per_owner=1",
    "eplb-past:interval=1",
    "eplb-past:interval=2:window=1",
]


def planned(name, iterations, slots):
    """A policy's outcome on some iterations, after the fit that it may ask for."""
    make = parse_policy(name)
    policy, batch = make(slots=slots), Batch(iterations)
    if make.needs_totals:
        policy.fit(sum(i.sum(axis=1, dtype=np.int64) for i in iterations))
    return batch, policy.plan(batch)


@st.composite
def cases(draw):
    ranks = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    experts = ranks * draw(st.integers(1, 5))
    top_k = draw(st.integers(1, min(3, experts)))
    counts = make_counts(
        draw(st.integers(0, 2**20)),
        iterations=draw(st.integers(1, 3)),
        layers=draw(st.integers(1, 2)),
        ranks=ranks,
        experts=experts,
        tokens=draw(st.integers(0, 40)),
        top_k=top_k,
    )
    if draw(st.booleans()):
        counts[0][:, 0] = 0  # a rank that brings nothing
    return counts, draw(st.integers(0, 5))


def run_routes(batch: Batch, outcome: Outcome) -> np.ndarray:
    """`[N, P, P]`: every single route sent where the outcome's rows say, source to rank."""
    flow = np.zeros((batch.num_plans, batch.num_ranks, batch.num_ranks), np.int64)
    rows = {}
    for plan, expert, quota in zip(outcome.plan, outcome.expert, outcome.quota, strict=True):
        assert (plan, expert) not in rows, f"two rows of plan {plan}, expert {expert}"
        rows[int(plan), int(expert)] = quota.astype(int)
    for n in range(batch.num_plans):
        for e in range(batch.num_experts):
            quota = rows.get((n, e))
            if quota is None:
                flow[n, :, e // batch.home] += batch.counts[n, :, e]
                continue
            left, surplus = quota.copy(), []
            for source in range(batch.num_ranks):
                kept = min(batch.counts[n, source, e], left[source])
                flow[n, source, source] += kept
                left[source] -= kept
                surplus += [source] * int(batch.counts[n, source, e] - kept)
            hosts = np.repeat(np.arange(batch.num_ranks), left)
            assert len(hosts) == len(surplus), f"plan {n} expert {e}: quota is not its routes"
            np.add.at(flow[n], (surplus, hosts), 1)
    return flow


@pytest.mark.parametrize("name", VARIANTS)
@settings(max_examples=20)
@given(case=cases())
def test_routes_are_conserved_and_loads_are_theirs(name, case):
    iterations, slots = case
    batch, outcome = planned(name, iterations, slots)
    flow = run_routes(batch, outcome)
    np.testing.assert_array_equal(flow.sum(axis=2), batch.sent)
    np.testing.assert_array_equal(flow.sum(axis=1), outcome.load)
    ranks = np.arange(batch.num_ranks)
    np.testing.assert_array_equal(flow[:, ranks, ranks], local_routes(batch, outcome))
    loads = loads_of(batch, outcome.plan, outcome.expert, outcome.quota)
    np.testing.assert_array_equal(loads, outcome.load)


@pytest.mark.parametrize("name", VARIANTS)
@settings(max_examples=20)
@given(case=cases())
def test_slots_and_owner_limits_are_kept(name, case):
    iterations, slots = case
    batch, outcome = planned(name, iterations, slots)
    static = name.startswith(("eplb", "lplb"))
    room = batch.home + slots if static else slots
    assert ((outcome.slots >= 0).sum(axis=2) <= room).all()
    held = np.zeros((batch.num_plans, batch.num_ranks, batch.num_experts + 1), bool)
    np.put_along_axis(held, outcome.slots, True, axis=2)  # -1 falls on the last, unused column
    if not static:
        owner = np.arange(batch.num_experts) // batch.home
        held[:, owner, np.arange(batch.num_experts)] = True
    used = outcome.quota > 0
    assert (held[outcome.plan, :, outcome.expert] | ~used).all(), "routes where no replica is"
    exports = outcome.owner_copies.max(initial=0)
    if name.split(":")[0] in ("haloq", "haloq-owner"):
        assert exports <= min(slots, batch.home)
    if name == "p2p-capped":
        assert exports <= 4
    if name == "p2p-capped:copies_per_owner=1":
        assert exports <= 1
    if not name.startswith(("none", "eplb", "lplb")):
        mean = -(-outcome.load.sum(axis=1) // batch.num_ranks)
        worst = np.maximum(mean, batch.load_before.max(axis=1))
        assert (outcome.load.max(axis=1) <= worst).all(), "worse than no balancing"


@settings(max_examples=40)
@given(case=cases(), group=st.sampled_from([1, 2, 4]))
def test_the_greedy_loop_places_what_the_planner_places(case, group):
    iterations, slots = case
    _, planner = planned(f"haloq:min_group_size={group}", iterations, slots)
    _, greedy = planned(f"haloq-owner:min_group_size={group}:owner_only=0", iterations, slots)
    for field, ours, theirs in zip(Outcome._fields, greedy, planner, strict=True):
        np.testing.assert_array_equal(ours, theirs, err_msg=field)


@given(case=cases())
def test_owner_restriction_holds(case):
    iterations, slots = case
    _, outcome = planned("haloq-owner:min_group_size=1", iterations, slots)
    assert not outcome.without_owner.any()


@settings(max_examples=30)
@given(case=cases())
def test_haloq_is_the_reference_planner(case):
    iterations, slots = case
    batch, outcome = planned("haloq", iterations, slots)
    for n in range(batch.num_plans):
        plan = reference.plan_counts(batch.counts[n], num_helper_slots=slots)
        np.testing.assert_array_equal(outcome.load[n], plan.load)
        rows = outcome.plan == n
        np.testing.assert_array_equal(outcome.expert[rows], plan.broadcasts[: rows.sum(), 0])
        np.testing.assert_array_equal(outcome.quota[rows], plan.quota[: rows.sum()])
        ranks = np.arange(batch.num_ranks)
        local = reference.flow(batch.counts[n], plan)[ranks, ranks]
        np.testing.assert_array_equal(local_routes(batch, outcome)[n], local)


def test_resident_slots_move_no_data_when_nothing_changes():
    (iteration,) = make_counts(3, iterations=1, layers=2, ranks=8, experts=32, tokens=64)
    batch, always = planned("haloq", [iteration] * 3, 4)
    _, resident = planned("haloq:resident=1", [iteration] * 3, 4)
    layers = batch.num_layers
    assert always.remote_copies[:layers].all()
    np.testing.assert_array_equal(resident.remote_copies[:layers], always.remote_copies[:layers])
    assert not resident.remote_copies[layers:].any()
    assert not resident.owner_copies[layers:].any()
    np.testing.assert_array_equal(resident.load, always.load)


def test_resident_slots_are_remembered_between_batches():
    (iteration,) = make_counts(3, iterations=1, layers=2, ranks=8, experts=32, tokens=64)
    policy = parse_policy("haloq:resident=1")(slots=4)
    assert policy.plan(Batch([iteration])).remote_copies.all()
    assert not policy.plan(Batch([iteration])).remote_copies.any()


def brute_force_lplb(batch, weight):
    """The lowest possible maximum load of each plan with fractional routes: bisection on max flow,
    by the subset condition: experts that live only within a set of ranks must fit there."""
    best = []
    for n in range(batch.num_plans):
        where = weight > 0
        worst = 0.0
        for subset in range(1, 2**batch.num_ranks):
            inside = np.array([subset >> r & 1 for r in range(batch.num_ranks)], bool)
            only = ~(where & ~inside).any(axis=1)
            worst = max(worst, batch.totals[n, only].sum() / inside.sum())
        best.append(worst)
    return np.array(best)


@settings(max_examples=25)
@given(case=cases())
def test_lplb_reaches_the_linear_programs_optimum(case):
    iterations, slots = case
    batch = Batch([counts[:1] for counts in iterations])
    policy = parse_policy("lplb:sweeps=60")(slots=slots)
    policy.fit(batch.totals.sum(axis=0, keepdims=True))
    outcome = policy.plan(batch)
    optimum = brute_force_lplb(batch, policy._placed[0][0])
    assert (outcome.load.max(axis=1) >= np.floor(optimum)).all()
    # Whole routes, and as many sweeps as there are: within a few routes of it.
    assert (outcome.load.max(axis=1) <= np.ceil(optimum) + batch.num_ranks).all()


def test_all_rank_levels_what_its_experts_can():
    counts = np.zeros((1, 4, 8), np.int32)
    counts[0, :, 0], counts[0, :, 7] = 40, 10
    _, outcome = planned("all-rank", [counts], 1)
    assert outcome.load.tolist() == [[50, 50, 50, 50]]
    assert outcome.remote_copies.tolist() == [3]
    assert outcome.owner_copies.tolist() == [[1, 0, 0, 0]]


def test_point_to_point_counts_a_copy_for_each_replica():
    counts = np.zeros((1, 4, 4), np.int32)
    counts[0, :, 0] = 40
    _, outcome = planned("p2p", [counts], 4)
    assert outcome.load.tolist() == [[40] * 4]
    assert outcome.owner_copies.tolist() == [[3, 0, 0, 0]]
    _, capped = planned("p2p-capped:copies_per_owner=2", [counts], 4)
    assert capped.load.tolist() == [[80, 40, 40, 0]]


def test_static_past_runs_the_first_iteration_at_home():
    iterations = make_counts(5, iterations=3, layers=2, ranks=4, experts=16)
    batch, outcome = planned("eplb-past:interval=1", iterations, 2)
    layers = batch.num_layers
    np.testing.assert_array_equal(outcome.load[:layers], batch.load_before[:layers])
    assert (outcome.load[layers:] != batch.load_before[layers:]).any()


@pytest.mark.parametrize("interval", [1, 2, 3, 10])
@pytest.mark.parametrize("window", [0, 1, 2])
@pytest.mark.parametrize("blocks", [[12], [1] * 12, [5, 4, 3]])
def test_static_past_replans_from_the_iterations_before(interval, window, blocks):
    """Iteration i is placed by the loads before the last replan: 1, 1 + interval, ..."""
    iterations = [
        counts
        for seed in range(6)
        for counts in make_counts(seed, iterations=2, ranks=4, experts=16)
    ]
    policy = parse_policy(f"eplb-past:interval={interval}:window={window}")(slots=2)
    found, start = [], 0
    for size in blocks:
        found.append(policy.plan(Batch(iterations[start : start + size])))
        start += size
    loads = np.concatenate([outcome.load for outcome in found]).reshape(12, 2, 4)
    tables = np.concatenate([outcome.slots for outcome in found]).reshape(12, 2, 4, -1)
    placements = set()
    for i, counts in enumerate(iterations):
        batch = Batch([counts])
        if i == 0:
            weight, table = home_placement(batch, 2)
        else:
            replan = 1 + (i - 1) // interval * interval
            past = iterations[max(0, replan - window) if window else 0 : replan]
            totals = sum(before.sum(axis=1, dtype=np.int64) for before in past)
            weight, table = place_static(totals, 4, 2)
        split = lambda b, plan, expert, w: even_split(b.totals[plan, expert], w)  # noqa: E731
        expected = split_static(batch, weight, table, split)
        np.testing.assert_array_equal(tables[i], table)
        np.testing.assert_array_equal(loads[i], expected.load)
        placements.add(table.tobytes())
    assert len(placements) >= 1 + 11 // interval  # so that a plan that stays is seen


@pytest.mark.parametrize(
    "text",
    [
        *(
            "haloq:min_group_size=4:min_routes=0:gain_threshold=0:copy_rule=owner_direct:resident=0",
        ),
        *("haloq-owner:min_group_size=4:owner_only=1", "all-rank:choose=layer", "lplb:sweeps=8"),
        *("p2p:copies_per_owner=0", "p2p-capped:copies_per_owner=4"),
        *("eplb-past:interval=10:window=0", "eplb-whole:slots=4", "none:slots=4"),
    ],
)
def test_defaults_of_the_settings(text):
    """What docs and `--help` call the default is what a policy without settings does."""
    assert parse_policy(text.split(":")[0])() == parse_policy(text)()


def test_a_policy_from_a_users_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import dataclasses\n"
        "from jax_iser.replay.policies import POLICIES\n"
        "@dataclasses.dataclass\n"
        "class Mine(POLICIES['none']):\n"
        "    name = 'mine'\n"
        "    depth: int = 3\n"
    )
    make = parse_policy(f"{path}:depth=5")
    assert make.label == "mine:depth=5"
    assert make(slots=2).depth == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nope", "not one of none, haloq"),
        ("haloq:size=1", "no setting 'size=1'"),
        ("haloq:min_routes=x", "not of type int"),
        ("all-rank:choose=coldest", "not one of layer, rank"),
        ("missing.py", "does not exist"),
    ],
)
def test_bad_policies_are_named(text, message):
    with pytest.raises(ValueError, match=message):
        parse_policy(text)
