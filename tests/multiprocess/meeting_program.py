"""One of three processes that make Domains together, or fail to; one line of JSON a step."""

import contextlib
import json
import os
import signal
import sys
import time

import jax
import numpy as np
from layers import jitted_layer, make_problem
from processes import globally, join

import jax_iser
from jax_iser.domain import meeting, rendezvous

PROBLEM = make_problem("W2", num_ranks=3, num_experts=6)
PAIR = make_problem("W2", num_ranks=2, num_experts=6)
ALONE = make_problem("W2", num_ranks=1, num_experts=6)


def make(problem, processes, **options):
    """A Domain over one device of each of the processes."""
    devices = [device for p in processes for device in jax.devices() if device.process_index == p]
    mesh = jax.sharding.Mesh(np.array(devices), ("ep",))
    limits = {"timeout_s": 30.0, "startup_timeout_s": 60.0}
    return jax_iser.Domain(mesh, "ep", **(problem.sizes | limits | options))


def run(problem, processes, **options):
    """Makes it, calls a layer, closes it."""
    with make(problem, processes, **options) as domain:
        operands = [globally(domain.mesh, a) for a in problem.operands[:3]]
        weights = jax.tree.map(lambda a: globally(domain.mesh, a), problem.weights)
        y, _ = jitted_layer(domain.mesh)(*operands, weights, domain.handle)
        y.block_until_ready()


@contextlib.contextmanager
def patched(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def as_user(uid):
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


def step(name, action):
    start = time.monotonic()
    try:
        action()
        text = "fine"
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    line = {"step": name, "seconds": time.monotonic() - start, "text": text}
    print(json.dumps(line), flush=True)


def die(_):
    os.kill(os.getpid(), signal.SIGKILL)


def main():
    me, _ = join(sys.argv)
    everybody = [0, 1, 2]
    step("sizes", lambda: make(PROBLEM, everybody, num_layers=2 if me == 1 else 1))
    with contextlib.ExitStack() as stack:
        if me == 1:
            stack.enter_context(patched(meeting, "host_id", lambda: "elsewhere"))
        step("host", lambda: make(PROBLEM, everybody))
    if os.geteuid() == 0:
        with contextlib.ExitStack() as stack:
            if me == 1:
                stack.enter_context(as_user(65534))
            step("user", lambda: make(PROBLEM, everybody))
    step("options", lambda: make(PROBLEM, everybody, **({"top_k": 7} if me == 1 else {})))
    with contextlib.ExitStack() as stack:
        if me == 1:
            stack.enter_context(patched(jax_iser.domain.Domain, "_place_words", lambda _: 1 / 0))
        step("words", lambda: make(PROBLEM, everybody))
    step("again", lambda: run(PROBLEM, everybody))

    # Groups of processes make Domains of their own, as many as each of them likes.
    if me == 2:
        for _ in range(3):
            step("alone", lambda: run(ALONE, [2]))
        step("alone, refused", lambda: run(ALONE, [2], top_k=7))
    else:
        step("pair", lambda: run(PAIR, [0, 1]))
        step("pair", lambda: run(PAIR, [0, 1]))
    step("together", lambda: run(PROBLEM, everybody))

    if me == 2:
        time.sleep(2.5)  # longer than the others wait
    step("late", lambda: make(PROBLEM, everybody, startup_timeout_s=1.0))
    step("after it", lambda: run(PROBLEM, everybody))

    with contextlib.ExitStack() as stack:
        if me == 1:
            stack.enter_context(patched(rendezvous, "_memfd", die))
        step("killed", lambda: make(PROBLEM, everybody))
    step("those left", lambda: run(PAIR, [0, 2]))
    os._exit(0)  # jax.distributed would wait for the process that is gone


if __name__ == "__main__":
    main()
