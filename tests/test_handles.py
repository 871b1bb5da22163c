"""Handles that do not belong to their program, Domains that nobody closed, several closers."""

import gc
import os
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from layers import jitted_layer, make_domain, make_problem

import jax_iser
from jax_iser.plan import plan_counts


def foreign(handle, config, **words):
    """The handle's words under another configuration, or with words changed."""
    array = handle.words
    for column, value in words.items():
        array = array.at[:, {"id": 0, "mark": 2}[column]].set(value)
    return jax_iser.DomainHandle(jax.device_put(array, handle.words.sharding), config)


@pytest.mark.parametrize("other", [{"num_helper_slots": 16}, {"dtype": "bfloat16"}])
def test_a_handle_of_other_sizes_is_an_error_and_nothing_is_written(other):
    problem = make_problem()
    sizes = {"min_group_size": 1} if "dtype" not in other else {}
    with make_domain(problem) as fits, make_domain(problem, **other, **sizes) as differs:
        handle = foreign(differs.handle, fits.config)
        words = r"IserError: .* another configuration"
        with pytest.raises(jax.errors.JaxRuntimeError, match=words):
            jax.block_until_ready(jitted_layer(fits.mesh)(*problem.operands, handle))
        differs.close(check=False)


def test_words_of_an_earlier_process_name_no_domain():
    problem = make_problem()
    with make_domain(problem) as domain:
        mark = int(domain.handle.words[0, 2])
        handle = foreign(domain.handle, domain.config, mark=mark ^ 1)
        with pytest.raises(jax.errors.JaxRuntimeError, match="not a handle of this process"):
            jax.block_until_ready(jitted_layer(domain.mesh)(*problem.operands, handle))


def test_closers_side_by_side_all_return():
    for _ in range(10):
        domain = make_domain(make_problem())
        errors = []

        def close(domain=domain, errors=errors):
            try:
                domain.close()
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=close) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert not any(thread.is_alive() for thread in threads)
        assert not errors
        assert not domain.is_open


def num_fds():
    return len(os.listdir("/proc/self/fd"))


def drop(domains):
    domains.clear()
    gc.collect()


def test_a_dropped_domain_is_released_with_a_warning():
    make_domain(make_problem()).close()  # starts what starts once
    fds, threads = num_fds(), len(os.listdir("/proc/self/task"))
    domains = [make_domain(make_problem())]
    with pytest.warns(ResourceWarning, match="dropped without close"):
        drop(domains)
    deadline = time.monotonic() + 60
    while num_fds() > fds or len(os.listdir("/proc/self/task")) > threads:
        assert time.monotonic() < deadline, "threads or descriptors of a dropped Domain are left"
        time.sleep(0.01)


DROPPED_AT_EXIT = """
from layers import jitted_layer, make_domain, make_problem, run_layer

def main():
    problem = make_problem()
    domain = make_domain(problem)
    run_layer(problem, domain=domain)
    domain.stall(3, "counts", 1.5)
    for _ in range(5):
        jitted_layer(domain.mesh)(*problem.operands, domain.handle)

main()  # drops the Domain with calls in flight
print("fine", flush=True)
"""


def test_leaving_python_right_after_a_domain_was_dropped():
    for _ in range(3):  # what must not happen is a matter of moments
        done = subprocess.run(
            [sys.executable, "-c", DROPPED_AT_EXIT], capture_output=True, text=True, timeout=100
        )
        assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


def test_a_domain_that_cannot_be_made_leaves_no_descriptor():
    problem = make_problem()
    fds = num_fds()
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"mapping .* bytes of symmetric memory failed"):
            make_domain(problem, max_tokens_per_rank=2**24, hidden_size=2**17)
    assert num_fds() == fds


@pytest.mark.parametrize(
    ("sizes", "error", "words"),
    [
        ({"hidden_size": 2**30, "intermediate_size": 2**30}, ValueError, "more than 1024 TiB"),
        ({"num_layers": 10**9}, ValueError, "num_layers=1000000000 exceeds"),
        ({"hidden_size": 32.0}, TypeError, "hidden_size=32.0 is not an integer"),
        ({"top_k": True}, TypeError, "top_k=True is not an integer"),
        ({"poison": "no"}, TypeError, "poison='no' is not True or False"),
        ({"timeout_s": "5"}, TypeError, "timeout_s='5' is not a number of seconds"),
    ],
)
def test_sizes_that_are_none(sizes, error, words):
    with pytest.raises(error, match=words):
        make_domain(make_problem(), **sizes)


@pytest.mark.parametrize(
    ("resident", "words"),
    [(np.full((2, 4), 2**32), "expected ids below 4"), (np.full((2, 4), 0.9), "expected integers")],
)
def test_resident_tables_that_are_none(resident, words):
    with pytest.raises(ValueError, match=words):
        plan_counts(np.ones((2, 4), np.int32), resident=resident)


def test_a_checked_shard_map_knows_what_differs_between_devices():
    problem = make_problem()
    with make_domain(problem) as domain:

        def layer(x, ids, scales, weights, handle):
            return jax_iser.moe_layer(x, ids, scales, weights, handle, axis_name="ep")[0]

        def mapped(body, out_specs):
            return jax.shard_map(body, mesh=domain.mesh, in_specs=P("ep"), out_specs=out_specs)

        def steps(x, *rest):
            return jax.lax.scan(lambda c, _: (layer(c, *rest), None), x, None, length=2)[0]

        def loss(x):
            return jnp.sum(mapped(layer, P("ep"))(x, *problem.operands[1:], domain.handle))

        operands = (*problem.operands, domain.handle)
        once = jax.jit(mapped(layer, P("ep")))(*operands)
        twice = jax.jit(mapped(layer, P("ep")))(once, *operands[1:])
        np.testing.assert_array_equal(jax.jit(mapped(steps, P("ep")))(*operands), twice)
        assert jax.jit(jax.grad(loss))(problem.x).shape == problem.x.shape
        with pytest.raises(ValueError, match="out_specs"):
            jax.jit(mapped(layer, P()))(*operands)
