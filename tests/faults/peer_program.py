"""One of two processes; what it does is told on its standard input, a word a line.

Prints `ready` after a first call of both. `call` makes a call in `layer` 0 and prints its outcome
and seconds; `call1` one in layer 1; `check` prints what `Domain.check` raises; `renew` closes the
Domain and runs a layer on one of this process's devices alone; `fork` prints the id of a child that
does nothing; `end` leaves without ceremony.
"""

import os
import signal
import sys
import time

import jax
import numpy as np
from layers import jitted_layer, make_domain, make_problem, mesh_of
from processes import globally, join

import jax_iser


def outcome(action) -> str:
    start = time.monotonic()
    try:
        action()
        text = "fine"
    except (jax.errors.JaxRuntimeError, jax_iser.IserError) as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return f"{time.monotonic() - start:.2f} {text}"


def run_alone():
    """A Domain of this process's devices only: nothing of the failed one stands in its way."""
    problem = make_problem("W2", num_ranks=4)
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()), ("ep",))
    with jax_iser.Domain(mesh, "ep", **problem.sizes) as domain:
        operands = [globally(mesh, a) for a in problem.operands[:3]]
        weights = jax.tree.map(lambda a: globally(mesh, a), problem.weights)
        y, _ = jitted_layer(mesh)(*operands, weights, domain.handle)
        y.block_until_ready()


def fork() -> int:
    """A child that lives until it is killed, with what its parent has open but the pipes."""
    child = os.fork()
    if child == 0:
        os.closerange(0, 3)
        signal.pause()
        os._exit(0)
    return child


def main():
    join(sys.argv)
    problem = make_problem("W2", num_experts=32, top_k=4)
    domain = make_domain(problem, num_layers=2, timeout_s=20.0)
    operands = [globally(mesh_of(8), a) for a in problem.operands[:3]]
    weights = domain.place(problem.weights)

    def call(layer=0):
        y, _ = jitted_layer(domain.mesh, layer=layer)(*operands, weights, domain.handle)
        y.block_until_ready()

    call()
    call(1)
    print("ready", flush=True)
    actions = {
        "call": call,
        "call1": lambda: call(1),
        "check": domain.check,
        "close": lambda: domain.close(),
        "renew": lambda: (domain.close(check=False), run_alone()),
    }
    for line in sys.stdin:
        if line.strip() == "end":
            break
        if line.strip() == "fork":
            print(0, fork(), flush=True)
            continue
        print(outcome(actions[line.strip()]), flush=True)
    # jax.distributed would wait for the peer that is gone.
    os._exit(0)


if __name__ == "__main__":
    main()
