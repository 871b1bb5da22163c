"""What a forked child may do with JAX and Domains: nothing, but it is told so at once."""

import json
import subprocess
import sys

import pytest
from processes import environment, finish

PROGRAM = """
import gc, json, os, signal, sys, time

import jax
import numpy as np
from flax import nnx
from layers import assert_same_bits, jitted_layer, make_domain, make_problem, run_layer

import jax_iser
from jax_iser.nnx import MoE, attach

problem = make_problem("W2")
domain = make_domain(problem, timeout_s=30.0)
expected, _ = run_layer(problem, domain=domain)
one_device = make_domain(problem, ranks_per_device=8)
run_layer(problem, domain=one_device)
model = MoE(
    num_experts=16, top_k=2, hidden_size=32, intermediate_size=48, mesh=domain.mesh,
    rngs=nnx.Rngs(0),
)
attach(model, domain)
apply = nnx.jit(lambda model, x: model(x))
apply(model, problem.x)


def in_child(name, action):
    child = os.fork()
    if child == 0:
        start = time.monotonic()
        try:
            action()
            text = "fine"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        line = {"name": name, "seconds": time.monotonic() - start, "text": text}
        print(json.dumps(line), flush=True)
        os._exit(0)
    return child


def drop():
    global domain, model
    domain = model = None
    gc.collect()
    time.sleep(0.5)  # what a dropped Domain starts ends on a thread


def leave():
    with domain:
        pass


def by_the_program_alone():
    jax_iser._fork._parent = None  # as if the fork had not been noticed
    run_layer(problem, domain=one_device)


for name, action in {
    "jit": lambda: run_layer(problem, domain=domain),
    "nnx.jit": lambda: apply(model, problem.x),
    "module": lambda: model(problem.x),
    "busy": lambda: domain.busy(),
    "make": lambda: make_domain(problem),
    "place": lambda: domain.place(problem.weights),
    "handler": by_the_program_alone,
}.items():
    child = in_child(name, action)
    for _ in range(200):
        if os.waitpid(child, os.WNOHANG)[0]:
            break
        time.sleep(0.05)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        print(json.dumps({"name": name, "seconds": 10.0, "text": "hangs"}), flush=True)

# While a call is in flight, children drop and leave the Domain of their parent.
domain.stall(3, "counts", 3.0)
start = time.monotonic()
pending = jitted_layer(domain.mesh)(*problem.operands, domain.handle)[0]
for name, action in {"drop": drop, "leave": leave, "close": lambda: domain.close()}.items():
    os.waitpid(in_child(name, action), 0)
in_flight = time.monotonic() - start < 3.0
assert_same_bits(pending, expected)
domain.check()
domain.close()
one_device.close()
print(json.dumps({"name": "parent", "seconds": 0.0, "text": f"in flight: {in_flight}"}))
"""

FORKED_FIRST = """
import os
import numpy as np
from jax_iser.plan import plan_many

counts = np.full((8, 16), 3, np.int32)
counts[:, 0] = 90


def plan():
    return plan_many(np.stack([counts] * 64), num_helper_slots=2)


plan()
child = os.fork()
from layers import make_problem, run_layer

plan()
y, _ = run_layer(make_problem("W2"), ranks_per_device=8)
print("fine", flush=True)
if child:
    assert os.waitpid(child, 0)[1] == 0
else:
    os._exit(0)
"""


def run(text, tmp_path, limit_s):
    program = tmp_path / "program.py"
    program.write_text(text)
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(program)],
        env=environment(8),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    ((code, out, err),) = finish([process], limit_s)
    assert code == 0, out + err[-4000:]
    return out


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    out = run(PROGRAM, tmp_path_factory.mktemp("fork"), 120)
    lines = [json.loads(line) for line in out.splitlines()]
    return {line["name"]: line for line in lines}


@pytest.mark.parametrize("name", ["jit", "nnx.jit", "module", "busy", "make", "place", "handler"])
def test_a_child_that_uses_a_domain_is_told_at_once(outcomes, name):
    line = outcomes[name]
    assert "this process was forked from process" in line["text"]
    assert "fork before the first use of JAX" in line["text"]
    assert line["seconds"] < 5


@pytest.mark.parametrize("name", ["drop", "leave", "close"])
def test_a_child_that_parts_with_a_domain_leaves_the_parents_call_alone(outcomes, name):
    assert outcomes[name]["text"] == "fine"
    assert outcomes["parent"]["text"] == "in flight: True"


def test_a_child_forked_before_jax_started_may_do_everything(tmp_path):
    assert run(FORKED_FIRST, tmp_path, 120).split() == ["fine", "fine"]
