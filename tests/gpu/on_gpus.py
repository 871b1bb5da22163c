"""What tests on GPUs share: where ranks live, Domains with short limits, calls that must fail."""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

import jax
import numpy as np
import pytest
from layers import OFF, apply_layer, make_domain, make_problem, run_layer

from jax_iser import IserError

# CPU devices in place of GPUs, where there are none; tests/conftest.py says how many.
STAND_INS = int(os.environ.get("ISER_TEST_GPUS_ON_CPU") or 0)
IS_GPU = not STAND_INS
LIMIT_S = 5.0 if IS_GPU else 30.0  # of a Domain's waits: a CPU's cores have other work too
STUCK_S = 30.0 if IS_GPU else 2.0  # a CPU's rank stays stuck when its Domain has failed
only_on_gpus = pytest.mark.skipif(not IS_GPU, reason="the CPU's calls do something else here")

# f32, and bf16 whose intermediate size is no multiple of 8, are for CUDA cores; the third is for
# tensor cores, with a last step and last columns that are partly there.
ENGINES = {
    "f32": {"dtype": "float32", "hidden": 68, "intermediate": 100},
    "bf16": {"dtype": "bfloat16", "hidden": 72, "intermediate": 132},
    "tensor": {"dtype": "bfloat16", "hidden": 136, "intermediate": 200},
}
# As tests/test_bitwise.py: a sum of top_k roundings to 24 or 8 bits of values of about one.
TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2}


class Place(NamedTuple):
    """Where ranks live."""

    gpus: int
    ranks_per_device: int

    @property
    def num_ranks(self) -> int:
        return self.gpus * self.ranks_per_device

    def __str__(self) -> str:
        return f"{self.gpus}x{self.ranks_per_device}"


EIGHT = (Place(1, 8), Place(2, 4))


def num_gpus() -> int:
    """GPUs that tests may use."""
    return STAND_INS or len(jax.devices())


def over(*places):
    """Parametrizes a test by `place`; conftest.py skips those with more GPUs than there are."""
    return pytest.mark.parametrize("place", places, ids=str)


def most_on_gpus(names, some):
    """Cases of a test: all on GPUs, some where CPUs stand for them and are as good as any."""
    return list(names) if IS_GPU else list(some)


def problem_at(place: Place, workload="W2", engine="f32", **sizes):
    """A problem for the place's ranks."""
    options = {"num_experts": 32, "top_k": 4} | ENGINES[engine] | sizes
    return make_problem(workload, num_ranks=place.num_ranks, **options)


def domain_at(problem, place: Place, **knobs):
    """A Domain there, whose limits end a test that hangs within seconds."""
    limits = {"timeout_s": LIMIT_S, "startup_timeout_s": LIMIT_S}
    return make_domain(problem, ranks_per_device=place.ranks_per_device, **limits | knobs)


@functools.cache
def layer_by_operand(mesh):
    """The layer over stacked weights, the layer's number an operand."""
    return jax.jit(lambda layer, *args: apply_layer(mesh, *args, layer=layer))


def outputs_by_position(problem, place: Place, row, num_rows: int) -> dict:
    """Outputs, without replicas, of a row of x that stands at one of the first after the other.

    By `(num_rows, position)`.
    """
    found = {}
    with domain_at(problem, place) as domain:
        for position in range(0, num_rows, 29):
            kept = problem.x[position].copy()
            problem.x[position] = row
            y, _ = run_layer(problem, domain=domain, options=OFF)
            found[num_rows, position] = y[position]
            problem.x[position] = kept
    return found


def assert_failed(call, code: int) -> None:
    """The call ends with NaN everywhere and the error's code as status."""
    if not IS_GPU:  # calls on CPUs raise; ValueError where they do so before they return
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="IserError"):
            jax.block_until_ready(call())
        return
    y, plan = jax.tree.map(np.asarray, call())
    assert int(plan.status) == code, f"status {plan.status}, expected {code}"
    numbers = np.argwhere(~np.isnan(y.astype(np.float32)))
    first = tuple(int(i) for i in numbers[0]) if len(numbers) else ()
    assert not len(numbers), f"{len(numbers)} of {y.size} outputs are no NaN, first at {first}"
    assert plan.num_broadcasts == 0
    assert (plan.route_slot == -1).all()


def assert_check_raises(domain, **fields) -> IserError:
    """`check` raises, with these attributes."""
    with pytest.raises(IserError) as caught:
        domain.check()
    found = {name: getattr(caught.value, name) for name in fields}
    assert found == fields, f"{caught.value}: {found}, expected {fields}"
    return caught.value
