"""One of two processes with a GPU each: python peer_program.py ADDRESS NUM_PROCESSES PROCESS FOLDER

Saves its shards of every case, prints `ready`, then does what its standard input says, a word a
line, and prints seconds and outcome: `call` a layer call, `check` of the Domain, `close` of a spare
one, `renew` a layer call of a Domain of this process's device alone.
"""

import os
import pathlib
import sys
import time

import jax
import numpy as np
from gpu.on_gpus import ENGINES, IS_GPU, Place, problem_at
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from layers import AXIS, jitted_layer, make_domain, make_problem, mesh_of

import jax_iser

# Name -> (engine, workload, options of the Domain).
CASES = {
    "f32": ("f32", "W2", {}),
    "tensor": ("tensor", "W1", {"min_group_size": 1}),
    "per-layer": ("bf16", "W3", {"bank": "per_layer", "num_layers": 2, "resident": True}),
}


def case(name):
    """(problem, Domain options): alike in all processes, and in a single one."""
    engine, workload, options = CASES[name]
    problem = problem_at(Place(2, 4), workload, engine)
    limits = {"timeout_s": 8.0, "startup_timeout_s": 60.0}
    return problem, {"ranks_per_device": 4} | limits | options


def join(argv):
    address, num_processes, index, *rest = argv[1:]
    # One GPU each, as JAX has it; the driver shows both to either.
    devices = {"local_device_ids": [int(index)]} if IS_GPU else {}
    if not IS_GPU:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        address,
        int(num_processes),
        int(index),
        cluster_detection_method="deactivate",
        **devices,
    )
    return int(index), rest


def globally(mesh, array):
    """The array sharded over the axis, each process giving its own part."""
    sharding = NamedSharding(mesh, P(AXIS))
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def spread(mesh, problem):
    return jax.tree.map(lambda a: globally(mesh, a), problem.operands)


def save_case(name, index, folder):
    problem, options = case(name)
    with make_domain(problem, **options) as domain:
        operands = spread(domain.mesh, problem)
        for call in range(2):
            y, plan = jitted_layer(domain.mesh)(*operands, domain.handle)
            (shard,) = y.addressable_shards
            (slots,) = plan.route_slot.addressable_shards
            np.savez(
                folder / f"{name}-{call}-{index}.npz",
                y=np.asarray(shard.data).view(np.uint8),
                route_slot=np.asarray(slots.data),
                **{
                    field: np.asarray(getattr(plan, field).addressable_shards[0].data)
                    for field in plan._fields
                    if field != "route_slot"
                },
            )


def outcome(action) -> str:
    start = time.monotonic()
    try:
        text = action() or "fine"
    except (jax.errors.JaxRuntimeError, ValueError, jax_iser.IserError) as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return f"{time.monotonic() - start:.2f} {text}"


def run_alone():
    """Nothing of the failed Domain stands in the way of one of this process's device."""
    problem = make_problem("W2", num_ranks=2, num_experts=8, **ENGINES["f32"])
    mesh = Mesh(np.array(jax.local_devices()[:1]), (AXIS,))
    with jax_iser.Domain(mesh, AXIS, ranks_per_device=2, **problem.sizes) as domain:
        y, _ = jitted_layer(mesh)(*spread(mesh, problem), domain.handle)
        assert np.isfinite(np.asarray(y)).all()


def main():
    index, (folder,) = join(sys.argv)
    assert len(jax.devices()) == len(mesh_of(2).devices) == 2
    for name in CASES:
        save_case(name, index, pathlib.Path(folder))
    problem, options = case("f32")
    domain, spare = make_domain(problem, **options), make_domain(problem, **options)
    operands = spread(domain.mesh, problem)

    def call():
        y, plan = jitted_layer(domain.mesh)(*operands, domain.handle)
        y = np.asarray(y.addressable_shards[0].data)
        status = int(plan.status.addressable_shards[0].data)
        if status:
            return f"status {status}, {np.isnan(y).mean():.0%} NaN"
        return "fine" if np.isfinite(y).all() else "status 0, but NaN"

    def renew():
        domain.close(check=False)
        run_alone()

    print(outcome(call).split(" ", 1)[1], flush=True)
    actions = {
        "call": call,
        "check": domain.check,
        "close": spare.close,
        "renew": renew,
    }
    for line in sys.stdin:
        print(outcome(actions[line.strip()]), flush=True)
    # jax.distributed would wait for a peer that is gone.
    os._exit(0)


if __name__ == "__main__":
    main()
