"""Plans on GPUs equal the NumPy twin: every field on every device, every rank's slots."""

import dataclasses

import jax
import numpy as np
import pytest
from gpu.on_gpus import EIGHT, Place, domain_at, over, problem_at
from layers import (
    PLAN_KNOBS,
    assert_same_bits,
    assert_same_plan,
    make_domain,
    make_problem,
    run_layer,
    run_plan,
)

from jax_iser.reference import planner as twin
from jax_iser.replay.workloads import WORKLOADS

pytestmark = pytest.mark.gpu

SMALL = {"dtype": "float32", "hidden": 4, "intermediate": 4}
NO_EXPERT = (-1, -(2**31), 2**31 - 1)


def plan_by_twin(problem, config, resident=None):
    return twin.plan_counts(
        problem.counts,
        num_helper_slots=config.num_helper_slots,
        min_group_size=config.min_group_size,
        min_routes=config.min_routes,
        gain_threshold=config.gain_threshold,
        copy_rule=config.copy_rule,
        resident=resident,
    )


def assert_slots(found, problem, config, expected, what):
    """`route_slot` of all ranks."""
    ids = problem.topk_ids.reshape(problem.num_ranks, -1, problem.topk_ids.shape[1])
    found = found.reshape(ids.shape)
    for rank in range(problem.num_ranks):
        slots = twin.rewrite(ids[rank], problem.counts, expected, rank, config.num_helper_slots)
        assert_same_bits(found[rank], slots, f"{what}: route_slot of rank {rank}")


def check_plan(problem, domain, what, *, generation, resident=None, **options):
    """Plans on the Domain; compares what every device has. Returns the twin's plan."""
    found = run_plan(problem, domain=domain, **options)
    expected = plan_by_twin(problem, domain.config, resident)
    for device in range(domain.config.num_devices):
        own = jax.tree.map(lambda a, d=device: a[d], found)
        where = f"{what}, device {device}"
        assert (own.status, own.generation) == (0, generation), where
        try:
            assert_same_plan(own, expected)
        except AssertionError as error:
            raise AssertionError(f"{where}: {error}") from error
    assert_slots(found.route_slot, problem, domain.config, expected, what)
    return expected


@pytest.mark.parametrize("workload", WORKLOADS)
@over(*EIGHT)
def test_workloads(place, workload):
    problem = problem_at(place, workload, **SMALL, step=1)
    with domain_at(problem, place) as domain:
        plan = check_plan(problem, domain, workload, generation=1)
    assert plan.num_broadcasts > 0 or workload in ("W0", "W7")


def random_case(rng, num_ranks):
    """Sizes and knobs."""
    num_experts = num_ranks * int(rng.integers(1, 9))
    sizes = {
        "num_experts": num_experts,
        "top_k": min(num_experts, int(rng.integers(1, 9))),
        "tokens": int(rng.integers(1, 40)),
    }
    knobs = {
        "num_helper_slots": int(rng.choice([1, 2, 3, 4, 4, 8, 16])),
        "min_group_size": int(rng.choice([1, 2, 4])),
        "min_routes": int(rng.choice([0, 0, 3, 12])),
        "gain_threshold": int(rng.choice([0, 0, 1050])),
        "copy_rule": str(rng.choice(twin.COPY_RULES)),
    }
    return sizes, knobs


def with_strange_ids(problem, rng):
    """Some routes go nowhere."""
    strange = rng.choice([*NO_EXPERT, problem.weights.gate.shape[0]], problem.topk_ids.shape)
    is_strange = rng.random(problem.topk_ids.shape) < rng.choice([0, 0.1, 0.9])
    ids = np.where(is_strange, strange, problem.topk_ids).astype(np.int32)
    return dataclasses.replace(problem, topk_ids=ids)


RANDOM_PLACES = [Place(g, p // g) for p in (2, 4, 8, 16, 24, 33, 72) for g in (1, 2) if p % g == 0]


@pytest.mark.parametrize("seed", [0, 1])
@over(*RANDOM_PLACES)
def test_random_cases(place, seed):
    """Three calls of one Domain for each seed; the text of a failure has all that it takes."""
    rng = np.random.default_rng((place.num_ranks, seed))
    sizes, knobs = random_case(rng, place.num_ranks)
    domain = None
    for call in range(3):
        workload = str(rng.choice(list(WORKLOADS)))
        made = problem_at(place, workload, **sizes, **SMALL, seed=int(rng.integers(1 << 30)))
        problem = with_strange_ids(made, rng)
        domain = domain or domain_at(problem, place, **knobs)
        what = f"P={place.num_ranks} seed={seed} call={call} {workload} {sizes} {knobs}"
        check_plan(problem, domain, what, generation=call + 1)
    domain.close()


@pytest.mark.parametrize("knobs", PLAN_KNOBS, ids=str)
@over(*EIGHT)
def test_knobs(place, knobs):
    problem = problem_at(place, **SMALL)
    with domain_at(problem, place, **knobs) as domain:
        plan = check_plan(problem, domain, str(knobs), generation=1)
    nothing = knobs.get("num_helper_slots") == 0 or knobs.get("gain_threshold") == 9000
    assert (plan.num_broadcasts == 0) == nothing


@over(*EIGHT)
def test_unbalanced_call_plans_nothing(place):
    problem = problem_at(place, **SMALL)
    with domain_at(problem, place) as domain:
        found = run_plan(problem, domain=domain, balance="none")
    assert (found.num_broadcasts == 0).all()
    np.testing.assert_array_equal(found.load, found.load_before)
    home = problem.topk_ids // 4 * 8 + problem.topk_ids % 4  # 4 home experts, 4 helper slots
    assert_same_bits(found.route_slot.reshape(home.shape), home, "route_slot")


@over(*EIGHT)
def test_many_experts_and_routes(place):
    """The largest sizes: more routes than one CTA's warps hold in a go."""
    problem = problem_at(place, "W1", num_experts=1024, top_k=8, tokens=1000, **SMALL)
    with domain_at(problem, place) as domain:
        check_plan(problem, domain, "E=1024, 64,000 routes", generation=1)


@over(*EIGHT)
def test_fewer_tokens_than_the_domain_takes(place):
    # jaxlib 0.11.2 crashes when it compiles for empty arrays that are split over devices.
    least = 0 if place.gpus == 1 else 1
    with domain_at(problem_at(place, **SMALL, tokens=24), place) as domain:
        for generation, tokens in enumerate((24, 5, least), 1):
            problem = problem_at(place, **SMALL, tokens=tokens)
            check_plan(problem, domain, f"{tokens} tokens", generation=generation)


class ResidentTable:
    """What helper slots of a layer hold, as the twin is told."""

    def __init__(self, config):
        self.config, self.version = config, None
        self.experts = np.full((config.num_ranks, config.num_helper_slots), -1, np.int32)

    def at(self, version):
        return self.experts if version == self.version else None

    def follow(self, plan, version):
        if version != self.version:
            self.experts[:], self.version = -1, version
        for expert, _, level, group, helper, _ in plan.broadcasts[: plan.num_broadcasts]:
            size = self.config.num_ranks >> level
            self.experts[group * size : (group + 1) * size, helper] = expert


@over(*EIGHT)
def test_resident_tables_over_several_calls(place):
    knobs = {"resident": True, "bank": "per_layer", "num_layers": 2, "copy_rule": "per_slot"}
    ways, generation = set(), 0
    with domain_at(problem_at(place, "W6"), place, **knobs) as domain:
        tables = [ResidentTable(domain.config) for _ in range(2)]
        calls = [(0, 0, 0), (0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0), (0, 0, 0), (0, 0, 1)]
        for step, layer, version in calls:
            what = f"step {step}, layer {layer}, version {version}"
            options = {"layer": layer, "weights_version": version}
            problem, table = problem_at(place, "W6", step=step), tables[layer]
            # A plan alone sees the table and leaves it as it is.
            expected = check_plan(
                problem,
                domain,
                f"plan alone, {what}",
                generation=generation + 1,
                resident=table.at(version),
                **options,
            )
            _, plan = run_layer(problem, domain=domain, options=options)
            generation += 2
            assert (plan.status, plan.generation) == (0, generation), what
            assert_same_plan(plan, expected)
            assert_slots(plan.route_slot, problem, domain.config, expected, what)
            table.follow(expected, version)
            ways |= set(expected.broadcasts[: expected.num_broadcasts, 5].tolist())
    assert 2 in ways
    assert ways != {2}


@over(*EIGHT)
def test_plans_and_outputs_of_gpus_and_cpus(place):
    """Plans are equal; outputs add their products in another order."""
    problem = problem_at(place, "W3")
    knobs = {"copy_rule": "per_slot", "min_group_size": 2}
    with domain_at(problem, place, **knobs) as domain:
        y, plan = run_layer(problem, domain=domain)
    with make_domain(problem, ranks_per_device=2, platform="cpu", **knobs) as domain:
        y_cpu, plan_cpu = run_layer(problem, domain=domain)
    assert_same_plan(plan, plan_cpu)
    assert_same_bits(plan.route_slot, plan_cpu.route_slot, "route_slot")
    assert_same_bits(plan.generation, plan_cpu.generation, "generation")
    np.testing.assert_allclose(y, y_cpu, atol=1e-5, rtol=1e-5)


def test_one_rank():
    problem = make_problem("W2", num_ranks=1, num_experts=4, **SMALL)
    with domain_at(problem, Place(1, 1)) as domain:
        assert check_plan(problem, domain, "one rank", generation=1).num_broadcasts == 0
