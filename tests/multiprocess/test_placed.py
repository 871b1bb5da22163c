"""Weights of a module that are placed lie in shared memory, and give the same bits."""

import json

import numpy as np
import pytest
from flax import nnx
from layers import make_problem, mesh_of
from processes import finish, start_processes

import jax_iser
from jax_iser.nnx import MoE, place

PROGRAM = """
import json
import sys

import jax
import numpy as np
from flax import nnx
from layers import make_domain, make_problem, mesh_of
from processes import globally, join

import jax_iser
from jax_iser.nnx import MoE, attach, place


def shared(variable):
    \"\"\"Whether each shard here lies in symmetric memory.\"\"\"
    with open("/proc/self/maps") as file:
        lines = [line.split()[0] for line in file if "memfd:jax_iser" in line]
    ranges = [tuple(int(end, 16) for end in line.split("-")) for line in lines]
    at = [shard.data.unsafe_buffer_pointer() for shard in variable[...].addressable_shards]
    return [any(first <= address < last for first, last in ranges) for address in at]


index, _ = join(sys.argv)
problem = make_problem("W2", num_experts=16, top_k=2)
mesh = mesh_of(8)
moe = MoE(32, 48, num_experts=16, top_k=2, mesh=mesh, rngs=nnx.Rngs(0))
for variable, plane in zip((moe.gate, moe.up, moe.down), problem.weights):
    variable[...] = globally(mesh, plane)
found = {}
with make_domain(problem, copy_rule="sami") as domain:
    attach(moe, domain)
    apply = jax.jit(lambda graph, state, x: nnx.merge(graph, state)(x), static_argnums=0)
    x = globally(mesh, problem.x)
    before = apply(*nnx.split(moe), x)
    found["before"] = sum(map(shared, (moe.gate, moe.up, moe.down)), [])
    place(moe, domain)
    after = apply(*nnx.split(moe), x)
    found["programs"] = apply._cache_size()
    found["after"] = sum(map(shared, (moe.gate, moe.up, moe.down)), [])
    found["same"] = all(
        np.array_equal(np.asarray(a.data).view(np.uint32), np.asarray(b.data).view(np.uint32))
        for a, b in zip(before.addressable_shards, after.addressable_shards)
    )
    try:
        other = jax.NamedSharding(mesh, jax.P(None, None, "ep"))
        domain.place(jax.device_put(moe.gate[...], other))
    except ValueError as error:
        found["refused"] = str(error)
try:
    with make_domain(problem) as domain:
        if index == 0:  # alone: the other one closes
            domain.place(np.zeros((16, 4, 4), np.float32))
except jax_iser.IserError as error:
    found["alone"] = str(error)
print(json.dumps(found))
"""


def test_weights_of_a_module_are_read_in_place(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    for index, (code, out, err) in enumerate(finish(start_processes(program, 2, 4), 120)):
        assert code == 0, err[-3000:]
        results = [line for line in out.splitlines() if line.startswith("{")]  # Gloo prints too
        found = json.loads(results[-1])
        assert found["before"] == [False] * 12
        assert found["after"] == [True] * 12
        assert found["same"]
        assert found["programs"] == 1
        assert "spread them over the experts" in found["refused"]
        done, did = "closed the Domain", "called Domain.place"
        words = f"{done} while this one {did}" if index == 0 else f"{did} while this one {done}"
        assert words in found["alone"]


def test_place_in_one_process_and_what_it_refuses():
    problem = make_problem("W2")
    moe = MoE(32, 48, num_experts=16, top_k=2, mesh=mesh_of(8), rngs=nnx.Rngs(0))
    with jax_iser.Domain(mesh_of(8), **problem.sizes) as domain:
        expected = np.asarray(moe.gate[...])
        place(moe, domain)
        np.testing.assert_array_equal(moe.gate[...], expected)
        with pytest.raises(TypeError, match="expected a jax_iser"):
            place(moe, domain.handle)
        with pytest.raises(ValueError, match="nothing to attach"):
            place(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), domain)
    with pytest.raises(ValueError, match="this Domain is closed"):
        place(moe, domain)
