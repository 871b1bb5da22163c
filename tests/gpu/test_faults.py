"""Late ranks, bad operands and closed Domains on GPUs: right, or NaN and an error with words."""

import functools
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.on_gpus import (
    EIGHT,
    IS_GPU,
    STUCK_S,
    Place,
    assert_check_raises,
    assert_failed,
    domain_at,
    layer_by_operand,
    only_on_gpus,
    over,
    problem_at,
)
from jax.sharding import PartitionSpec as P
from layers import (
    AXIS,
    OFF,
    PLAN_SPECS,
    assert_same_bits,
    jitted_layer,
    jitted_plan,
    run_layer,
)

import jax_iser
from jax_iser import IserError
from jax_iser.methods.fused.start import Ticket

pytestmark = pytest.mark.gpu
HERE = pathlib.Path(__file__).resolve().parent
TIMEOUT, OVERLAP, BAD_FUSED_MOE, BAD_HANDLE, BAD_LAYER, MISMATCH = 1, 10, 7, 8, 9, 3
STAGES = ("counts", "dispatch", "READY")  # GPUs stage nothing for other processes


@functools.cache
def problem_of(workload="W2", seed=0):
    return problem_at(EIGHT[0], workload, seed=seed)


@functools.cache
def expected():
    with domain_at(problem_of(), EIGHT[0]) as domain:
        return run_layer(problem_of(), domain=domain, options=OFF)[0]


@pytest.mark.parametrize("rank", [0, 3, 7])
@pytest.mark.parametrize("stage", STAGES)
@over(*EIGHT)
def test_a_late_rank_changes_no_bit(place, stage, rank):
    with domain_at(problem_of(), place) as domain:
        # Other weights and routes before: a replica read too early is a wrong one.
        run_layer(problem_of("W1", 1), domain=domain)
        domain.stall(rank, stage, 0.1)
        start = time.monotonic()
        y, plan = run_layer(problem_of(), domain=domain)
        assert time.monotonic() - start > 0.09, "the stall did not happen"
        assert plan.num_broadcasts > 0
        assert_same_bits(y, expected())


def test_a_rank_seconds_late(widest):
    late_s = 5.0 if IS_GPU else 1.0
    with domain_at(problem_of(), widest, timeout_s=30.0, startup_timeout_s=30.0) as domain:
        run_layer(problem_of("W1", 1), domain=domain)
        start = time.monotonic()
        domain.stall(6, "READY", late_s)
        y, _ = run_layer(problem_of(), domain=domain)
        assert time.monotonic() - start > 0.98 * late_s, "the stall did not happen"
        assert_same_bits(y, expected())


@pytest.mark.parametrize("stage", STAGES)
@over(*EIGHT)
def test_a_rank_later_than_the_limit_fails_the_domain(place, stage):
    if stage == "dispatch" and place.gpus == 1:
        pytest.skip("on one GPU what waits for dispatch is enqueued behind the arrival")
    if not IS_GPU and (place.gpus, stage) == (1, "counts"):
        pytest.skip("one thread of the CPU arrives for all ranks: nobody waits")
    problem = problem_of()
    domain = domain_at(problem, place, timeout_s=0.7)
    run_layer(problem, domain=domain)
    domain.check()
    domain.stall(5, stage, STUCK_S)
    start = time.monotonic()
    assert_failed(lambda: run_layer(problem, domain=domain), TIMEOUT)
    assert 0.6 < time.monotonic() - start < 5, "the others waited for the rank that is stuck"
    fields = {"code": TIMEOUT, "peer": 5, "layer": 0, "stage": stage, "generation": 2}
    error = assert_check_raises(domain, **fields)
    assert f"waited 700 ms for rank 5 in layer 0, stage {stage}, generation 2" in str(error)
    assert "raise timeout_s" in str(error)
    assert 0 <= error.rank < 8
    # A rank computes while it copies, so it may be the first to miss its own READY; on GPUs its
    # other CTAs wait for the one that is to send its counts.
    assert error.rank != 5 or stage == "READY" or (IS_GPU and stage == "counts")
    for _ in range(2):
        start = time.monotonic()
        assert_failed(lambda: run_layer(problem, domain=domain), TIMEOUT)
    assert time.monotonic() - start < 0.5, "a call on a failed Domain has to fail at once"
    assert_check_raises(domain, **fields)
    with pytest.raises(IserError, match="waited 700 ms for rank 5"):
        domain.close()
    assert not domain.is_open
    with domain_at(problem, place) as fresh:
        assert_same_bits(run_layer(problem, domain=fresh)[0], expected(), "output of a new Domain")


def test_the_first_call_has_a_limit_of_its_own(widest):
    with domain_at(problem_of(), widest, timeout_s=0.2) as domain:
        domain.stall(1, "READY", 0.6)
        assert_same_bits(run_layer(problem_of(), domain=domain)[0], expected())
    domain = domain_at(problem_of(), widest, startup_timeout_s=1.0)
    domain.stall(1, "READY", STUCK_S)
    assert_failed(lambda: run_layer(problem_of(), domain=domain), TIMEOUT)
    assert "raise startup_timeout_s" in str(assert_check_raises(domain, peer=1, generation=1))
    domain.close(check=False)


@only_on_gpus
def test_a_late_rank_of_a_plan_alone(widest):
    domain = domain_at(problem_of(), widest, timeout_s=0.5, startup_timeout_s=1.0)
    domain.stall(4, "counts", STUCK_S)
    plan = jitted_plan(domain.mesh)(problem_of().topk_ids, domain.handle)
    assert (np.asarray(plan.status) == TIMEOUT).all()
    assert (np.asarray(plan.route_slot) == -1).all()
    assert_check_raises(domain, code=TIMEOUT, peer=4, stage="counts")
    domain.close(check=False)


def test_leaving_the_context_raises(widest):
    def leave(error=None):
        with domain_at(problem_of(), widest, startup_timeout_s=1.0) as domain:
            domain.stall(2, "READY", STUCK_S)
            assert_failed(lambda: run_layer(problem_of(), domain=domain), TIMEOUT)
            if error is not None:
                raise error

    with pytest.raises(IserError, match="for rank 2 in layer 0, stage READY, generation 1"):
        leave()
    with pytest.raises(ZeroDivisionError):
        leave(ZeroDivisionError())


@only_on_gpus
@pytest.mark.parametrize("layer", [2, -1, 2**31 - 1, -(2**31)])
def test_a_layer_out_of_range(widest, layer):
    domain = domain_at(problem_of(), widest, num_layers=2)
    run_layer(problem_of(), domain=domain, options={"layer": 1})
    call = layer_by_operand(domain.mesh)  # a layer that is known is refused before the call
    operands = problem_of().operands
    assert_failed(lambda: call(np.int32(layer), *operands, domain.handle), BAD_LAYER)
    error = assert_check_raises(domain, code=BAD_LAYER, layer=layer)
    assert f"got layer {layer}, outside the 2 layers" in str(error)
    domain.close(check=False)


@only_on_gpus
def test_a_layer_outside_the_stack(widest):
    problem = problem_at(widest, num_layers=2)
    domain = domain_at(problem, widest, num_layers=5)
    assert run_layer(problem, domain=domain, options={"layer": 1})[1].status == 0
    assert_failed(lambda: run_layer(problem, domain=domain, options={"layer": 2}), BAD_LAYER)
    assert "got layer 2, outside the 2 layers" in str(assert_check_raises(domain, code=BAD_LAYER))
    domain.close(check=False)


def on_devices(body, mesh):
    """`body` on each device, giving (y, plan)."""
    return jax.jit(
        jax.shard_map(
            body,
            mesh=mesh,
            in_specs=P(AXIS),
            out_specs=(P(AXIS), PLAN_SPECS),
            check_vma=False,
        )
    )


@only_on_gpus
@pytest.mark.parametrize("of", [0, 1], ids=["first", "second"])
def test_two_starts_without_fused_moe_between(widest, of):
    def body(x, ids, topk_weights, weights, handle):
        first, x = jax_iser.start(x, ids, weights, handle)
        second, x = jax_iser.start(x, ids, weights, handle)
        y, plan = jax_iser.fused_moe(x, topk_weights, weights, first)
        y_second, plan_second = jax_iser.fused_moe(x, topk_weights, weights, second, after=y)
        return ((y, plan), (y_second, plan_second))[of]

    domain = domain_at(problem_of(), widest)
    operands = (*problem_of().operands, domain.handle)
    assert_failed(lambda: on_devices(body, domain.mesh)(*operands), OVERLAP)
    error = assert_check_raises(domain, code=OVERLAP, layer=0)
    assert "began a call before the one before it had ended" in str(error)
    domain.close(check=False)
    with domain_at(problem_of(), widest) as fresh:
        assert_same_bits(run_layer(problem_of(), domain=fresh)[0], expected())


@only_on_gpus
def test_a_start_without_fused_moe_fails_the_next_call(widest):
    def lone(x, ids, topk_weights, weights, handle):
        return jax_iser.start(x, ids, weights, handle)[1]

    domain = domain_at(problem_of(), widest)
    operands = (*problem_of().operands, domain.handle)
    specs = {"in_specs": P(AXIS), "out_specs": P(AXIS), "check_vma": False}
    jax.block_until_ready(jax.jit(jax.shard_map(lone, mesh=domain.mesh, **specs))(*operands))
    assert_failed(lambda: run_layer(problem_of(), domain=domain), OVERLAP)
    assert_check_raises(domain, code=OVERLAP)
    domain.close(check=False)


@only_on_gpus
def test_a_fused_moe_of_other_tokens_than_its_start(widest):
    def body(x, ids, topk_weights, weights, handle):
        ticket, x = jax_iser.start(x, ids, weights, handle)
        half = len(x) // 2
        y, plan = jax_iser.fused_moe(x[:half], topk_weights[:half], weights, ticket)
        return y, plan

    domain = domain_at(problem_of(), widest)
    operands = (*problem_of().operands, domain.handle)
    assert_failed(lambda: on_devices(body, domain.mesh)(*operands), BAD_FUSED_MOE)
    assert_check_raises(domain, code=BAD_FUSED_MOE)
    domain.close(check=False)


@only_on_gpus
def test_a_fused_moe_without_start_is_an_error(widest):
    """The host knows that no start is in flight, and raises.

    Unless one never got its fused_moe, here or in another Domain: then the device tells.
    """

    def body(x, ids, topk_weights, weights, handle):
        ticket = Ticket(handle.words, handle.config)
        return jax_iser.fused_moe(x, topk_weights, weights, ticket)

    domain = domain_at(problem_of(), widest)
    operands = (*problem_of().operands, domain.handle)
    told = "no start is in flight"
    try:
        assert_failed(lambda: on_devices(body, domain.mesh)(*operands), BAD_FUSED_MOE)
    except jax.errors.JaxRuntimeError as error:
        told = str(error)
    domain.close(check=False)
    assert "no start is in flight" in told
    with domain_at(problem_of(), widest) as domain:
        assert_same_bits(run_layer(problem_of(), domain=domain)[0], expected())


@over(EIGHT[1])
def test_devices_in_different_layers_are_told_so(place):
    def body(x, ids, topk_weights, weights, handle):
        layer = (jax.lax.axis_index(AXIS) == 1).astype("int32")
        return jax_iser.moe_layer(x, ids, topk_weights, weights, handle, layer=layer)

    domain = domain_at(problem_of(), place, num_layers=2)
    operands = (*problem_of().operands, domain.handle)
    assert_failed(lambda: on_devices(body, domain.mesh)(*operands), MISMATCH)
    error = assert_check_raises(domain, code=MISMATCH)
    assert "make the same calls in the same order" in str(error)
    assert (error.rank < 4) != (error.peer < 4), f"ranks {error.rank} and {error.peer}"
    domain.close(check=False)


def foreign(handle, config, **words):
    """The handle's words under another configuration, or with words changed."""
    array = handle.words
    for column, value in words.items():
        array = array.at[:, {"id": 0, "first_rank": 1, "mark": 2}[column]].set(np.uint32(value))
    array = jax.device_put(array, handle.words.sharding)
    return jax_iser.DomainHandle(array, config)


def assert_misuse(problem, handle, bystander):
    """A call with the handle gives NaN, and the next check of an open Domain tells."""
    call = jitted_layer(bystander.mesh)
    assert_failed(lambda: call(*problem.operands, handle), BAD_HANDLE)
    error = assert_check_raises(bystander, code=BAD_HANDLE)
    assert "named a Domain that is not open or has another configuration" in str(error)
    bystander.check()  # told once


@only_on_gpus
@over(*EIGHT)
def test_a_handle_of_a_closed_domain(place):
    problem = problem_of()
    with domain_at(problem, place) as open_one:
        closed = domain_at(problem, place)
        assert_same_bits(run_layer(problem, domain=closed)[0], expected())
        closed.close()
        assert_misuse(problem, closed.handle, open_one)
        plan = jitted_plan(open_one.mesh)(problem.topk_ids, closed.handle)
        assert (np.asarray(plan.status) == BAD_HANDLE).all()
        assert_check_raises(open_one, code=BAD_HANDLE)
        assert_same_bits(run_layer(problem, domain=open_one)[0], expected())


@only_on_gpus
@pytest.mark.parametrize("words", [{"mark": 1}, {"id": 0}, {"id": 2**32 - 1}, {"first_rank": 1}])
def test_words_that_name_no_domain(widest, words):
    with domain_at(problem_of(), widest) as domain:
        assert_misuse(problem_of(), foreign(domain.handle, domain.config, **words), domain)
        assert_same_bits(run_layer(problem_of(), domain=domain)[0], expected())


@only_on_gpus
@pytest.mark.parametrize("other", [{"num_helper_slots": 16}, {"top_k": 2}, {"timeout_s": 4.0}])
def test_a_handle_of_another_configuration(widest, other):
    problem = problem_of()
    with domain_at(problem, widest) as fits, domain_at(problem, widest, **other) as differs:
        assert_misuse(problem, foreign(differs.handle, fits.config), fits)
        assert_same_bits(run_layer(problem, domain=fits)[0], expected())


@over(*EIGHT)
def test_closing_waits_for_calls_in_flight(place):
    problem = problem_of()
    for run in range(5):
        domain = domain_at(problem, place)
        if run % 2:
            domain.stall(2, "READY", 0.1)
        call = jitted_layer(domain.mesh)
        pending = [call(*problem.operands, domain.handle)[0] for _ in range(4)]
        domain.close()
        for number, y in enumerate(pending):
            assert_same_bits(y, expected(), f"output {number} of run {run}")


def test_closing_waits_for_a_plan_alone(widest):
    domain = domain_at(problem_of(), widest)
    domain.stall(0, "counts", 0.3)
    found = jitted_plan(domain.mesh)(problem_of().topk_ids, domain.handle)
    domain.close(wait_s=0.1)
    assert (np.asarray(found.status) == 0).all()
    assert (np.asarray(found.load).sum(axis=1) == problem_of().topk_ids.size).all()


@only_on_gpus
def test_closing_when_nobody_holds_the_results(widest):
    """In processes of their own, side by side: they may lose their GPUs."""
    program, said = HERE / "closing_program.py", []
    processes = {
        scenario: subprocess.Popen(
            [sys.executable, str(program), scenario, str(widest.gpus)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for scenario in ("dropped", "dropped-late", "dropped-plan", "dropped-exit")
    }
    deadline = time.monotonic() + 50
    for scenario, process in processes.items():
        try:
            out, err = process.communicate(timeout=max(1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            err += "\nkilled: it did not end within 50 s"
        if process.returncode != 0 or not out.strip().endswith("fine"):
            said.append(f"{scenario}: exit code {process.returncode}\n{out}\n{err[-2000:]}")
    assert not said, "\n\n".join(said)


def test_close_twice_and_use_after(widest):
    domain = domain_at(problem_of(), widest)
    domain.close()
    domain.close()
    assert not domain.is_open
    for use in (
        domain.check,
        lambda: domain.helper(0, 0, 0),
        lambda: domain.stall(0, "counts", 0.1),
        lambda: domain.place(problem_of().weights),
    ):
        with pytest.raises(ValueError, match="this Domain is closed; make a new one"):
            use()


def test_ranks_slots_and_stages_that_are_none(widest):
    with domain_at(problem_of(), widest) as domain:
        for use in (
            lambda: domain.helper(8, 0, 0),
            lambda: domain.helper(0, 0, 4),
            lambda: domain.helper(-1, 0, 0),
            lambda: domain.stall(8, "counts", 0.1),
            lambda: domain.stall(0, "tea", 0.1),
        ):
            with pytest.raises((ValueError, IndexError)):
                use()
        assert_same_bits(run_layer(problem_of(), domain=domain)[0], expected())


@only_on_gpus
def test_sizes_that_gpus_do_not_take():
    place = Place(1, 2)
    with pytest.raises(ValueError, match="multiples of 8"):
        domain_at(problem_at(place, dtype="bfloat16", hidden=12, intermediate=16), place)


@over(*EIGHT)
def test_nan_in_tokens_stays_in_its_tokens(place):
    problem = problem_at(place)
    clean, _ = run_layer_at(problem, place)
    problem.x[5], problem.x[100, 3] = np.nan, np.inf
    y, plan = run_layer_at(problem, place)
    assert plan.status == 0
    others = np.delete(np.arange(len(y)), [5, 100])
    assert_same_bits(y[others], clean[others], "tokens without NaN")
    assert jnp.isnan(y[5]).all()


def run_layer_at(problem, place):
    with domain_at(problem, place) as domain:
        return run_layer(problem, domain=domain)
