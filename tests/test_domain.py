"""The Domain's life: sizes, context, two at once, close, what it says of itself."""

import ctypes
import gc
import os
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from layers import (
    AXIS,
    apply_layer,
    assert_same_bits,
    jitted_layer,
    make_domain,
    make_problem,
    mesh_of,
    run_layer,
)

import jax_iser
from jax_iser.domain import DomainConfig, cpu, describe

SIZES = {
    "num_experts": 16,
    "top_k": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_tokens_per_rank": 24,
}
PROBLEM = make_problem("W2")


def mappings() -> int:
    """Mappings of this process's symmetric memory."""
    with open("/proc/self/maps") as file:
        return sum("memfd:jax_iser" in line for line in file)


def test_describe_adds_up_and_needs_no_domain():
    config = DomainConfig(num_ranks=8, **SIZES, num_layers=3)
    told = describe(config)
    sections = told["bytes_per_rank"]
    bundle = 3 * 32 * 48 * 4
    assert sections["helper banks"] == 2 * 4 * bundle == 8 * config.bundle_bytes
    assert sections["tokens"] == 24 * 32 * 4
    assert sections["combine"] == 2 * sections["tokens"]
    assert sections["staging"] == 0
    assert describe(config, 2)["bytes_per_rank"]["staging"] == 2 * bundle
    assert sum(sections.values()) <= told["bytes_total"] / 8 < sum(sections.values()) + 8 * 256
    with make_domain(PROBLEM, num_layers=3) as domain:
        assert domain.describe()["bytes_total"] == told["bytes_total"]
        assert domain.describe()["config"]["num_layers"] == 3


@pytest.mark.parametrize(
    ("bank", "num_layers", "banks"), [("shared", 1, 1), ("shared", 7, 2), ("per_layer", 7, 7)]
)
def test_banks(bank, num_layers, banks):
    config = DomainConfig(num_ranks=8, **SIZES, bank=bank, num_layers=num_layers)
    assert config.num_banks == banks
    sections = describe(config)["bytes_per_rank"]
    assert sections["helper banks"] == banks * 4 * config.bundle_bytes


def test_the_first_call_of_several_processes_may_take_longer():
    """They may have to compile first, each in its own time."""
    sizes = {"num_ranks": 8, **SIZES, "timeout_s": 7.0}
    config = DomainConfig(**sizes)
    assert (config.startup_limit_s(False), config.startup_limit_s(True)) == (7.0, 600.0)
    config = DomainConfig(**sizes, startup_timeout_s=30.0)
    assert (config.startup_limit_s(False), config.startup_limit_s(True)) == (30.0, 30.0)


def test_handle_is_one_sharded_array_and_static_sizes():
    with make_domain(PROBLEM, ranks_per_device=2) as domain:
        leaves, _ = jax.tree.flatten(domain.handle)
        assert [(leaf.shape, leaf.dtype) for leaf in leaves] == [((4, 4), np.uint32)]
        assert len(leaves[0].addressable_shards) == 4
        assert np.asarray(leaves[0])[:, 1].tolist() == [0, 2, 4, 6]
        hash(domain.handle.config)


def test_memory_goes_with_the_domain():
    run_layer(PROBLEM)  # threads of the pool and of XLA start at first use
    gc.collect()
    before, descriptors = mappings(), len(os.listdir("/proc/self/fd"))
    threads = len(os.listdir("/proc/self/task"))
    for _ in range(3):
        with make_domain(PROBLEM) as domain:
            run_layer(PROBLEM, domain=domain)
            assert mappings() == before + 1
    assert mappings() == before
    assert len(os.listdir("/proc/self/fd")) == descriptors
    # XLA may start a thread or two more; each Domain had sixteen.
    assert len(os.listdir("/proc/self/task")) < threads + 16


def test_close_twice_and_use_after():
    domain = make_domain(PROBLEM)
    assert domain.is_open
    domain.close()
    domain.close()
    assert not domain.is_open
    for use in (
        domain.check,
        domain.busy,
        domain.timelines,
        lambda: domain.helper(0, 0, 0),
        lambda: domain.stall(0, "counts", 0.1),
        lambda: domain.place(PROBLEM.weights),
    ):
        with pytest.raises(ValueError, match="this Domain is closed; make a new one"):
            use()


def test_close_waits_for_calls_in_flight():
    expected, _ = run_layer(PROBLEM)
    for _ in range(10):
        domain = make_domain(PROBLEM)
        y, _ = jitted_layer(domain.mesh)(*PROBLEM.operands, domain.handle)
        jax.block_until_ready(y)
        pending, _ = jitted_layer(domain.mesh)(*PROBLEM.operands, domain.handle)
        closing = threading.Thread(target=domain.close)
        closing.start()
        try:
            assert_same_bits(pending, expected)
            outcome = "right"
        except jax.errors.JaxRuntimeError as error:
            outcome = str(error)
        # An error where close came between start and fused_moe, or before either.
        assert outcome == "right" or ("IserError:" in outcome and "closed" in outcome)
        closing.join(timeout=60)
        assert not closing.is_alive()


def test_close_waits_for_programs_between_two_of_their_layers():
    """No call is in flight there, and the next one still needs the Domain."""
    matrix = np.eye(32, dtype=np.float32)

    @jax.jit
    def two_layers(x, handle):
        def layer(x):
            return apply_layer(mesh_of(1), x, *PROBLEM.operands[1:], handle)[0]

        def step(_, x):
            return jnp.tanh(x @ matrix)

        return layer(lax.fori_loop(0, 10_000, step, layer(x)))  # some tenths of a second

    with make_domain(PROBLEM, ranks_per_device=8) as domain:
        expected = np.asarray(two_layers(PROBLEM.x, domain.handle))
    domain = make_domain(PROBLEM, ranks_per_device=8)
    y = two_layers(PROBLEM.x, domain.handle)
    limit = time.monotonic() + 60
    while not domain.timelines():
        assert time.monotonic() < limit, "the first layer does not end"
    domain.close()
    assert_same_bits(y, expected)


def test_close_is_idle_before_it_parts_and_parts_before_it_releases(monkeypatch):
    """A process that leaves looks dead to calls that still wait for its ranks."""
    domain, order = make_domain(PROBLEM), []

    def recorded(what, method):
        def call(*args):
            order.append(what)
            return method(*args)

        return call

    for owner, name in (
        (domain._runtime, "wait_idle"),
        (domain._members, "part"),
        (domain._runtime, "close"),
    ):
        monkeypatch.setattr(owner, name, recorded(name, getattr(owner, name)))
    domain.close()
    assert order == ["wait_idle", "part", "close"]


GUARD = b"\xa5" * 64  # ffi/core/layout.h


def guards() -> list[int]:
    """Addresses of the guard words in the one Domain's memory."""
    with open("/proc/self/maps") as file:
        (line,) = [line for line in file if "memfd:jax_iser" in line]
    begin, end = (int(address, 16) for address in line.split()[0].split("-"))
    memory = ctypes.string_at(begin, end - begin)
    found, at = [], memory.find(GUARD)
    while at >= 0:
        found.append(begin + at)
        at = memory.find(GUARD, at + len(GUARD))
    return found


def test_an_overwritten_guard_is_told():
    """Behind each section of each rank, in a Domain for each: the first error stays."""
    names = list(describe(DomainConfig(num_ranks=2, **SIZES))["bytes_per_rank"])
    problem = make_problem("W2", num_ranks=2)
    for number in range(2 * len(names)):
        with make_domain(problem) as domain:
            addresses = guards()
            assert len(addresses) == 2 * len(names), names
            domain.check()
            ctypes.memset(addresses[number] + 7 * number % 64, 0, 1)
            rank, section = divmod(number, len(names))
            words = f"rank {rank} found a guard word behind section {names[section]} overwritten"
            with pytest.raises(jax_iser.IserError, match=words):
                domain.check()
            domain.close(check=False)


def test_busy_counts_rows_and_time_of_each_rank():
    with make_domain(PROBLEM, ranks_per_device=2, num_layers=3) as domain:
        _, plan = run_layer(PROBLEM, domain=domain, options={"layer": 2})
        seconds, rows = domain.busy(reset=True)
        assert rows.shape == seconds.shape == (3, 8)
        np.testing.assert_array_equal(rows[2], plan.load)
        assert (rows[:2] == 0).all()
        assert ((seconds[2] > 0) == (rows[2] > 0)).all()
        assert (domain.busy()[1] == 0).all()


def test_timelines_are_kept_in_order():
    with make_domain(PROBLEM, ranks_per_device=8) as domain:
        for _ in range(5):
            run_layer(PROBLEM, domain=domain)
        assert [t.generation for t in domain.timelines()] == [1, 2, 3, 4, 5]
        assert [t.first_rank for t in domain.timelines()] == [0] * 5


def test_timelines_are_bounded():
    """The oldest go: of 4 devices the last 1,024 calls are kept."""
    problem = make_problem("W0", num_ranks=4, num_experts=4, tokens=1, hidden=4, intermediate=4)
    with make_domain(problem) as domain:

        def layers(x, handle):
            def layer(_, x):
                return apply_layer(domain.mesh, x, *problem.operands[1:], handle)[0]

            return lax.fori_loop(0, 1100, layer, x)

        jax.jit(layers)(problem.x, domain.handle).block_until_ready()
        calls = domain.timelines()
    assert len(calls) == 4096
    for rank in range(4):
        generations = [t.generation for t in calls if t.first_rank == rank]
        assert generations == list(range(1101 - len(generations), 1101))
        assert abs(len(generations) - 1024) <= 4  # devices are a call apart at most


def test_place_in_one_process_shards_over_experts():
    with make_domain(PROBLEM) as domain:
        placed = domain.place(PROBLEM.weights)
        assert isinstance(placed, jax_iser.ExpertWeights)
        assert placed.gate.addressable_shards[3].data.shape == (2, 48, 32)
        y, _ = jitted_layer(domain.mesh)(*PROBLEM.operands[:3], placed, domain.handle)
        with pytest.raises(ValueError, match=r"num_experts=16 on axis 0"):
            domain.place(PROBLEM.weights.gate[:5])
    assert_same_bits(y, run_layer(PROBLEM)[0])
    assert_same_bits(placed.gate, PROBLEM.weights.gate)  # lives past the Domain


def test_axis_of_any_mesh_order():
    """Ranks follow the order of the mesh, not the numbers of its devices."""
    mesh = Mesh(np.array(jax.devices()[::-1]), (AXIS,))
    with jax_iser.Domain(mesh, AXIS, **PROBLEM.sizes) as domain:
        y, _ = jitted_layer(mesh)(*PROBLEM.operands, domain.handle)
        assert_same_bits(y, run_layer(PROBLEM)[0])


def test_a_part_of_the_devices():
    problem = make_problem("W2", num_ranks=3, num_experts=6)
    mesh = Mesh(np.array(jax.devices()[2:5]), (AXIS,))
    with jax_iser.Domain(mesh, AXIS, **problem.sizes) as domain:
        y, _ = jitted_layer(mesh)(*problem.operands, domain.handle)
    assert_same_bits(y, run_layer(problem, ranks_per_device=3)[0])


def test_generations_go_on_for_thousands_of_calls():
    problem = make_problem("W2", num_ranks=2, num_experts=4, tokens=2)
    with make_domain(problem) as domain:
        call = jitted_layer(mesh_of(2))
        first = np.asarray(call(*problem.operands, domain.handle)[0])
        for _ in range(300):
            y, plan = call(*problem.operands, domain.handle)
        assert_same_bits(y, first)
        assert plan.generation == 301
        domain.check()


@pytest.mark.parametrize("first", [2**32 - 4, 2**32 - 1])
def test_independent_calls_while_generations_wrap_around(first, monkeypatch):
    """Devices come to calls that do not depend on each other in orders of their own."""
    options_of = cpu.options_of

    def begin_late(*arguments):
        options = options_of(*arguments)
        options.first_generation = first
        return options

    monkeypatch.setattr(cpu, "options_of", begin_late)
    expected, _ = run_layer(PROBLEM)
    with make_domain(PROBLEM, timeout_s=20.0) as domain:

        def program(x, *operands):
            results = [apply_layer(domain.mesh, x * 2**i, *operands) for i in range(8)]
            return [y for y, _ in results], [plan.generation for _, plan in results]

        outputs, generations = jax.jit(program)(*PROBLEM.operands, domain.handle)
        jax.block_until_ready(outputs)
        again, plan = run_layer(PROBLEM, domain=domain)
        assert_same_bits(outputs[0], expected)
        assert_same_bits(again, expected)
    wanted = [(first + i) % 2**32 for i in range(9)]
    assert sorted(int(g) for g in generations) == sorted(wanted[:8])
    assert plan.generation == wanted[8]
