"""The order of a layer's calls is data: `start`, then the shared expert, then `fused_moe`.

Read in the program's operands, before and after optimisation, on CPUs and lowered for GPUs, which
nobody has to have; and seen in a shared expert that ends only once the copies have landed.
"""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dataflow import Graph, hlo_of
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from layers import (
    AXIS,
    PLAN_SPECS,
    apply_layer,
    assert_replicas,
    assert_same_bits,
    jitted_layer,
    make_domain,
    make_problem,
    mesh_of,
    run_layer,
)

import jax_iser
import jax_iser.nnx
from jax_iser.methods.fused.fused_moe import fused_moe
from jax_iser.methods.fused.start import start

TICKET = 0  # the operand of fused_moe that start made


def check_order(text, *, num_layers=1, shared="tanh", num_shared=1):
    """Every layer's shared expert is made of the x that its `start` gave, and goes to `fused_moe`.

    The shared expert is `num_shared` instructions of one kind.
    """
    graph = Graph(text)
    starts, fused = (graph.calls(f"jax_iser.{name}") for name in ("start", "fused_moe"))
    assert len(starts) == len(fused) == num_layers
    for call in fused:
        ticket = call.operands[TICKET]
        (begun,) = ticket.operands
        assert begun in starts, "fused_moe's ticket is not start's"
        assert ticket.index == 0
        ends = [node for node in call.sources() if node.opcode == shared]
        assert ends, "fused_moe does not wait for the shared expert"
        own = [node for node in ends if begun in node.sources()]
        assert len(own) == num_shared, "the shared expert does not wait for start"
        passed_on = {n.index for node in own for n in node.sources() if begun in n.operands}
        assert passed_on == {1}, f"the shared expert takes results {passed_on} of start, not x"


def check_lowered(lowered, **expected):
    check_order(hlo_of(lowered), **expected)
    check_order(lowered.compile().as_text(), **expected)


PLACES = pytest.mark.parametrize("ranks_per_device", [1, 4, 8])


@PLACES
def test_order_of_a_layer(ranks_per_device):
    problem = make_problem()
    with make_domain(problem, ranks_per_device=ranks_per_device) as domain:
        call = jitted_layer(domain.mesh, shared_expert=jnp.tanh)
        check_lowered(call.lower(*problem.operands, domain.handle))


def test_order_of_layers_in_a_row_and_in_a_scan():
    problem = make_problem()
    with make_domain(problem, ranks_per_device=4, num_layers=3) as domain:

        def layer(x, number):
            y, _ = apply_layer(
                domain.mesh,
                x,
                *problem.operands[1:],
                domain.handle,
                layer=number,
                shared_expert=jnp.tanh,
            )
            return x + y

        def in_a_row(x):
            for number in range(3):
                x = layer(x, number)
            return x

        def in_a_scan(x):
            return lax.scan(lambda x, number: (layer(x, number), ()), x, jnp.arange(3))[0]

        check_lowered(jax.jit(in_a_row).lower(problem.x), num_layers=3)
        check_lowered(jax.jit(in_a_scan).lower(problem.x))


@pytest.mark.parametrize("remat", [False, True])
def test_order_under_a_gradient(remat):
    problem = make_problem()
    with make_domain(problem, ranks_per_device=4) as domain:

        def total(x):
            # Cosine keeps tanh to the shared expert.
            def layer(x):
                options = {"shared_expert": jnp.tanh}
                return apply_layer(domain.mesh, x, *problem.operands[1:], domain.handle, **options)[
                    0
                ]

            layer = jax.checkpoint(layer, prevent_cse=False) if remat else layer
            return jnp.cos(layer(x)).sum()

        check_lowered(jax.jit(jax.value_and_grad(total)).lower(problem.x))


def test_order_of_the_nnx_module():
    """Its shared expert is a gated MLP of three products."""
    mesh = mesh_of(2)
    sizes = {"num_experts": 16, "top_k": 2}
    model = nnx.eval_shape(
        lambda: jax_iser.nnx.MoE(16, 24, **sizes, num_shared_experts=1, mesh=mesh, rngs=nnx.Rngs(0))
    )
    with jax_iser.Domain(
        mesh,
        AXIS,
        ranks_per_device=4,
        hidden_size=16,
        intermediate_size=24,
        max_tokens_per_rank=6,
        **sizes,
    ) as domain:
        graph, state = nnx.split(model)

        x = jax.ShapeDtypeStruct((2, 24, 16), jnp.float32)

        def call(state, x, handle):
            return nnx.merge(graph, state)(x, domain=handle)

        lowered = jax.jit(call).lower(state, x, domain.handle)
        check_order(hlo_of(lowered), shared="dot", num_shared=3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_order_for_gpus(dtype, monkeypatch):
    from jax_iser import _extension
    from jax_iser.domain.cuda import runtime

    if _extension.iser_cuda is None:  # the size of scratch alone is asked of the extension
        monkeypatch.setattr(runtime, "workspace_bytes", lambda config, tokens: 4096)
    problem = make_problem(dtype=dtype, hidden=64, intermediate=128)
    config = jax_iser.DomainConfig(
        num_ranks=8, ranks_per_device=4, platform="cuda", **problem.sizes
    )

    def on_device(x, ids, topk_weights, weights, words):
        handle = jax_iser.DomainHandle(words, config)
        return jax_iser.moe_layer(x, ids, topk_weights, weights, handle, shared_expert=jnp.tanh)

    call = jax.shard_map(
        on_device,
        mesh=AbstractMesh((2,), (AXIS,), axis_types=(AxisType.Auto,)),
        in_specs=P(AXIS),
        out_specs=(P(AXIS), PLAN_SPECS),
        check_vma=False,
    )
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), problem.operands)
    words = jax.ShapeDtypeStruct((2, 4), jnp.uint32)
    lowered = jax.jit(call).trace(*shapes, words).lower(lowering_platforms=("cuda",))
    check_order(hlo_of(lowered))


@pytest.mark.parametrize(
    ("is_started", "is_awaited", "words"),
    [
        (True, True, None),
        (False, True, "the shared expert does not wait for start"),
        (True, False, "fused_moe does not wait for the shared expert"),
    ],
)
def test_the_check_sees_a_missing_dependency(is_started, is_awaited, words):
    problem = make_problem()
    with make_domain(problem, ranks_per_device=4) as domain:

        def on_device(x, ids, topk_weights, weights, handle):
            ticket, passed = start(x, ids, weights, handle)
            shared = jnp.tanh(passed if is_started else x)
            after = shared if is_awaited else None
            return fused_moe(passed, topk_weights, weights, ticket, after=after)[0] + shared

        call = jax.shard_map(
            on_device, mesh=domain.mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False
        )
        lowered = jax.jit(call).lower(*problem.operands, domain.handle)
        for text in (hlo_of(lowered), lowered.compile().as_text()):
            if words is None:
                check_order(text)
                continue
            with pytest.raises(AssertionError, match=words):
                check_order(text)


class SharedExpert:
    """Ends only when the copies of the call have landed.

    Attributes:
      seen: when it began and ended on each device, monotonic ns.
      is_late: whether no copy landed within a limit.
    """

    def __init__(self, domain, problem, plan):
        self.domain, self.problem, self.plan = domain, problem, plan
        self.seen, self.is_late = {}, False

    def __call__(self, x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(self.wait, shape, lax.axis_index(AXIS), x)

    def wait(self, device, x):
        begin, limit = time.monotonic_ns(), time.monotonic() + 20
        while not self.have_landed() and not self.is_late:
            self.is_late = time.monotonic() > limit
        self.seen[int(device)] = begin, time.monotonic_ns()
        return np.tanh(x)

    def have_landed(self) -> bool:
        try:
            return assert_replicas(self.domain, self.problem, self.plan) > 0
        except AssertionError:
            return False


@pytest.mark.parametrize("ranks_per_device", [8, 4])
def test_copies_land_while_the_shared_expert_runs(ranks_per_device):
    problem = make_problem("W2", num_experts=32, top_k=4)
    expected, plan = run_layer(problem, ranks_per_device=ranks_per_device)
    with make_domain(problem, ranks_per_device=ranks_per_device) as domain:
        shared = SharedExpert(domain, problem, plan)
        call = jitted_layer.__wrapped__(domain.mesh, shared_expert=shared)
        y, _ = jax.block_until_ready(call(*problem.operands, domain.handle))
        calls = domain.timelines()
    assert not shared.is_late, "no copy landed while the shared expert ran"
    assert_same_bits(y, expected + np.tanh(problem.x))
    assert {t.first_rank for t in calls} == set(range(0, 8, ranks_per_device))
    for t in calls:
        begin, end = shared.seen[t.first_rank // ranks_per_device]
        assert t.started <= begin, "the shared expert began before start was called"
        assert end <= t.fused_called, "fused_moe was called before the shared expert had ended"
        assert t.started <= t.planned <= t.copy_begin <= t.copy_end <= t.ready_seen <= t.finished


def test_home_tiles_run_before_ready_and_helper_tiles_after_it():
    """Seen in the rows computed so far, while one rank's copies are late."""
    problem, stall_s = make_problem("W2", num_experts=32, top_k=4), 1.5
    expected, plan = run_layer(problem)
    slots = plan.route_slot % 8  # 4 home experts, 4 helper slots
    num_home, num_helper = int((slots < 4).sum()), int((slots >= 4).sum())
    assert min(num_home, num_helper) > 100
    with make_domain(problem) as domain:
        domain.stall(2, "READY", stall_s)
        results, begun = [], time.monotonic()

        def run():
            results.append(run_layer(problem, domain=domain)[0])

        call = threading.Thread(target=run)
        call.start()
        most = 0
        while True:
            rows = int(domain.busy()[1].sum())
            if time.monotonic() > begun + stall_s:
                break  # the rank may have come meanwhile
            most = max(most, rows)
        call.join(timeout=60)
        assert int(domain.busy()[1].sum()) == num_home + num_helper
    assert most == num_home, f"{most} rows before READY, expected the {num_home} of home experts"
    assert_same_bits(results[0], expected)
