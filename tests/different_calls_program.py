"""One of two processes, of which the second makes another call than the first, case by case.

Prints a line for each case: its name, and what the call ended in.
"""

import sys

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from layers import AXIS, jitted_layer, jitted_plan, make_domain, make_problem, mesh_of
from processes import join

import jax_iser

CASES = ("alike", "weights_version", "balance", "tokens", "plan alone")


def globally(mesh, array):
    """The array sharded over the axis, each process giving its own part."""
    sharding = NamedSharding(mesh, P(AXIS))
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def call(domain, problem, case):
    """What the odd process does, or with `alike` both."""
    mesh, options = domain.mesh, {}
    weights = jax.tree.map(lambda plane: globally(mesh, plane), problem.weights)
    rows = len(problem.x) // 2 if case == "tokens" else len(problem.x)
    operands = [globally(mesh, a[:rows]) for a in problem.operands[:3]]
    if case == "plan alone":
        return jitted_plan(mesh)(operands[1], domain.handle)
    if case == "weights_version":
        options = {"weights_version": 1}
    if case == "balance":
        options = {"balance": "none"}
    return jitted_layer(mesh, **options)(*operands, weights, domain.handle)


def main():
    index, _ = join(sys.argv)
    problem = make_problem("W2", num_ranks=4)
    assert len(mesh_of(4).devices) == 4
    for case in CASES:
        domain = make_domain(problem, timeout_s=20.0)
        try:
            jax.block_until_ready(call(domain, problem, case if index == 1 else "alike"))
            text = "fine"
        except jax.errors.JaxRuntimeError as error:
            text = " ".join(str(error).split())
        try:
            domain.close()
        except jax_iser.IserError as error:
            text += f" (closed with code {error.code})"
        print(f"{case}: {text}", flush=True)


if __name__ == "__main__":
    main()
