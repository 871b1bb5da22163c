"""Closes a Domain whose results nobody holds; prints `fine` where its GPUs still work after it."""

import sys
import time

import numpy as np
from gpu.on_gpus import Place, domain_at, problem_at
from layers import assert_same_bits, jitted_layer, jitted_plan, run_layer


def main():
    scenario, gpus = sys.argv[1], int(sys.argv[2])
    place = Place(gpus, 8 // gpus)
    problem = problem_at(place)
    with domain_at(problem, place) as domain:
        expected, _ = run_layer(problem, domain=domain)
    domain = domain_at(problem, place, timeout_s=20.0, startup_timeout_s=20.0)
    if scenario != "dropped":
        domain.stall(3, "counts", 2.0 if scenario == "dropped-exit" else 30.0)
    start = time.monotonic()
    if scenario == "dropped-plan":
        jitted_plan(domain.mesh)(problem.topk_ids, domain.handle)
    else:
        for _ in range(5):
            jitted_layer(domain.mesh)(*problem.operands, domain.handle)
    if scenario == "dropped-exit":
        print("fine", flush=True)
        return  # the interpreter closes it
    domain.close(check=False, wait_s=0.3)
    assert time.monotonic() - start < 12, "closing waited for the rank that is stuck"
    with domain_at(problem, place) as fresh:
        y, plan = run_layer(problem, domain=fresh)
    assert np.asarray(plan.status) == 0
    assert_same_bits(y, expected, "output of a new Domain")
    print("fine")


if __name__ == "__main__":
    main()
