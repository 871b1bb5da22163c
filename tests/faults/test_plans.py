"""Ranks that derive different plans are told so before a helper tile runs."""

from processes import finish, start_processes

PROGRAM = """
import sys

import jax
from layers import jitted_layer, make_domain, make_problem
from processes import globally, join

import jax_iser

index, _ = join(sys.argv)
# As with two versions of the planner: configurations that look alike, plans that differ.
jax_iser.DomainConfig.digest = property(lambda config: 1)
problem = make_problem("W2", num_experts=32, top_k=4)
domain = make_domain(problem, min_routes=index << 20)
operands = [globally(domain.mesh, a) for a in problem.operands[:3]]
weights = jax.tree.map(lambda a: globally(domain.mesh, a), problem.weights)
try:
    y, _ = jitted_layer(domain.mesh)(*operands, weights, domain.handle)
    y.block_until_ready()
except jax.errors.JaxRuntimeError as error:
    print(error)
try:
    domain.close()
except jax_iser.IserError as error:
    print("code", error.code, "stage", error.stage, "ranks", error.rank // 4, error.peer // 4)
"""


def test_different_plans_are_told_to_both_processes(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    for code, out, err in finish(start_processes(program, 2, 4), 90):
        assert code == 0, err[-3000:]
        assert "has plan hash" in out
        assert "all ranks need the same options and the same version of jax_iser" in out
        assert "code 4 stage READY" in out
        noticed, differs = out.rsplit("ranks ", 1)[1].split()
        assert {noticed, differs} == {"0", "1"}  # of different processes
