"""A late rank changes nothing; one that is too late fails the call on all ranks, with words."""

import concurrent.futures
import time

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from layers import (
    AXIS,
    PLAN_SPECS,
    assert_same_bits,
    make_domain,
    make_problem,
    mesh_of,
    run_layer,
)

import jax_iser
from jax_iser import IserError
from jax_iser.domain import STAGES

PROBLEM = make_problem("W2", num_experts=32, top_k=4)
OTHER = make_problem("W1", num_experts=32, top_k=4, seed=1)


@pytest.fixture(scope="module")
def expected():
    return run_layer(PROBLEM)[0]


@pytest.mark.parametrize("ranks_per_device", [1, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_a_late_rank_changes_no_bit(stage, ranks_per_device, expected):
    with make_domain(PROBLEM, ranks_per_device=ranks_per_device, poison=True) as domain:
        for rank in (0, 7):
            # Other weights and routes before: a replica read too early is a wrong one.
            run_layer(OTHER, domain=domain)
            domain.stall(rank, stage, 0.1)
            start = time.monotonic()
            y, _ = run_layer(PROBLEM, domain=domain)
            assert time.monotonic() - start > 0.09, "the stall did not happen"
            assert_same_bits(y, expected)


def has_failed(domain) -> bool:
    try:
        domain.check()
    except IserError:
        return True
    return False


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_later_than_the_limit_fails_the_domain(stage, expected):
    domain = make_domain(PROBLEM, timeout_s=0.7)
    run_layer(PROBLEM, domain=domain)
    domain.check()
    domain.stall(5, stage, 2.0)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        start = time.monotonic()
        call = pool.submit(run_layer, PROBLEM, domain=domain)
        while not has_failed(domain):
            assert time.monotonic() - start < 1.9, "the others waited for the rank that is stuck"
            time.sleep(0.01)
        # jax may wait for the stuck device before it tells.
        with pytest.raises(jax.errors.JaxRuntimeError, match="IserError: rank ") as caught:
            call.result(timeout=60)
    words = f"waited 700 ms for rank 5 in layer 0, stage {stage}, generation 2"
    assert words in str(caught.value)
    assert "raise timeout_s" in str(caught.value)

    # jax lets the next program wait until the device that is stuck has left the last one.
    for _ in range(2):
        start = time.monotonic()
        with pytest.raises(jax.errors.JaxRuntimeError, match=words):
            run_layer(PROBLEM, domain=domain)
    assert time.monotonic() - start < 0.5, "a call on a failed Domain has to fail at once"

    for leave in (domain.check, domain.close):
        with pytest.raises(IserError, match=words) as error:
            leave()
        assert (error.value.code, error.value.peer) == (1, 5)
        assert error.value.stage == stage
        assert (error.value.layer, error.value.generation) == (0, 2)
        # A rank computes while it copies, so it may be the first to miss its own READY.
        assert error.value.rank != 5 or stage in ("staging", "READY")
    assert not domain.is_open
    assert_same_bits(run_layer(PROBLEM)[0], expected, "output of a new Domain")


def test_the_first_call_has_a_limit_of_its_own():
    with make_domain(PROBLEM, timeout_s=0.2, startup_timeout_s=30.0) as domain:
        domain.stall(1, "counts", 0.6)
        run_layer(PROBLEM, domain=domain)


def fail_a_domain(error=None):
    """Leaves the context of a failed Domain, with an error of its own where one is given."""
    with make_domain(PROBLEM, startup_timeout_s=0.3) as domain:
        domain.stall(2, "dispatch", 0.8)
        with pytest.raises(jax.errors.JaxRuntimeError):
            run_layer(PROBLEM, domain=domain)
        if error is not None:
            raise error


def test_leaving_the_context_raises():
    with pytest.raises(IserError, match="for rank 2 in layer 0, stage dispatch, generation 1"):
        fail_a_domain()


def test_an_error_inside_the_context_is_not_replaced():
    with pytest.raises(ZeroDivisionError):
        fail_a_domain(ZeroDivisionError())


def test_ranks_in_different_layers_are_told_so():
    def on_device(x, ids, topk_weights, weights, handle):
        layer = (jax.lax.axis_index(AXIS) == 3).astype("int32")
        return jax_iser.moe_layer(x, ids, topk_weights, weights, handle, layer=layer)

    call = jax.shard_map(
        on_device,
        mesh=mesh_of(8),
        in_specs=(P(AXIS),) * 5,
        out_specs=(P(AXIS), PLAN_SPECS),
        check_vma=False,
    )
    domain = make_domain(PROBLEM, num_layers=2)
    words = r"IserError: rank \d is in layer \d, but rank \d is in layer \d"
    with pytest.raises(jax.errors.JaxRuntimeError, match=words):
        jax.block_until_ready(jax.jit(call)(*PROBLEM.operands, domain.handle))
    with pytest.raises(IserError, match="make the same calls in the same order") as error:
        domain.close()
    assert error.value.code == 3
    assert 3 in (error.value.rank, error.value.peer)


def test_closing_waits_for_a_late_rank():
    plan = jax.jit(
        jax.shard_map(
            lambda ids, handle: jax_iser.plan(ids, handle).load,
            mesh=mesh_of(8),
            in_specs=P(AXIS),
            out_specs=P(),
            check_vma=False,
        )
    )
    domain = make_domain(PROBLEM)
    domain.stall(0, "counts", 0.5)
    load = plan(PROBLEM.topk_ids, domain.handle)
    domain.close(wait_s=0.1)
    assert np.asarray(load).sum() == PROBLEM.topk_ids.size


def test_closing_a_domain_whose_rank_is_stuck():
    """What waits for the rank ends at the limit, before the rank comes back."""
    domain = make_domain(PROBLEM, startup_timeout_s=0.3)
    domain.stall(6, "dispatch", 1.0)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        call = pool.submit(run_layer, PROBLEM, domain=domain)
        while not has_failed(domain):
            time.sleep(0.01)
        with pytest.raises(IserError, match="for rank 6 in layer 0, stage dispatch"):
            domain.close()
        with pytest.raises(jax.errors.JaxRuntimeError, match="IserError: rank "):
            call.result(timeout=60)
