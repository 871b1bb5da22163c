"""One process of a layer run: computes the cases and saves its shards as files of its own."""

import pathlib
import sys

import jax
import numpy as np
from layers import (
    jitted_layer,
    make_domain,
    make_fp8_problem,
    make_problem,
    mesh_of,
)
from processes import globally, join

# Name -> (problem, Domain options). `placed` puts the weights in shared memory.
CASES = {
    "staged-f32": ({"workload": "W2"}, {}),
    "staged-bf16": ({"workload": "W1", "dtype": "bfloat16"}, {"copy_rule": "sami"}),
    "placed-f32": ({"workload": "W2"}, {"copy_rule": "sami"}),
    "placed-bf16": ({"workload": "W3", "dtype": "bfloat16"}, {"copy_rule": "owner_direct"}),
    "placed-per-slot": ({"workload": "W2"}, {"copy_rule": "per_slot", "min_group_size": 1}),
    "staged-per-slot": ({"workload": "W6"}, {"copy_rule": "per_slot", "min_group_size": 1}),
    "staged-ranks": ({"workload": "W2"}, {"ranks_per_device": 2}),
    "staged-fp8": ({"workload": "W2"}, {"copy_rule": "sami"}),
    "placed-fp8": ({"workload": "W2", "dtype": "bfloat16"}, {"copy_rule": "per_slot"}),
}


def problem_of(name):
    options = {"num_experts": 32, "top_k": 4} | CASES[name][0]
    make = make_fp8_problem if "fp8" in name else make_problem
    return make(**options, num_ranks=16 if "ranks" in name else 8)


def run_case(name, index, folder):
    problem = problem_of(name)
    with make_domain(problem, **CASES[name][1]) as domain:
        x, ids, topk_weights, weights = problem.operands
        operands = [globally(domain.mesh, a) for a in (x, ids, topk_weights)]
        if name.startswith("placed"):
            weights = domain.place(weights)
        else:
            weights = type(weights)(*(globally(domain.mesh, plane) for plane in weights.planes))
        for call in range(2):
            y, plan = jitted_layer(domain.mesh)(*operands, weights, domain.handle)
            for shard in y.addressable_shards:
                rows = f"{shard.index[0].start or 0:06d}"
                (folder / f"{name}-{call}-{rows}.bin").write_bytes(np.asarray(shard.data).tobytes())
            load = np.asarray(plan.load.addressable_shards[0].data)
            broadcasts = np.asarray(plan.broadcasts.addressable_shards[0].data)
            np.savez(folder / f"{name}-{call}-plan{index}.npz", load=load, broadcasts=broadcasts)


def main():
    index, (folder,) = join(sys.argv)
    assert len(jax.devices()) == len(mesh_of(len(jax.devices())).devices) == 8
    assert len(jax.local_devices()) < 8
    for name in CASES:
        run_case(name, index, pathlib.Path(folder))
    print("done")


if __name__ == "__main__":
    main()
