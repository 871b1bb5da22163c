"""The layer in JAX on GPUs: copies beside the shared expert, and the whole layer OFF and ON.

    python3 benchmarks/cuda/bench_layer.py --json OUT.json    # all GPUs there are, one rank each
    python3 benchmarks/cuda/bench_layer.py --ranks 8          # more ranks than GPUs share them

Rank 0's experts are hot: at the defaults four of them (38.5 MB each) are copied. Before anything
is timed ON is compared with OFF to the bit. From `Domain.timelines()`, of the slowest device:

  span_us   from start to the later of the shared expert's end and the end of the copies
  layer_us  from start to the finished output
  shared_us, copy_us   what the span is the longest of: up to the shared expert's end, up to READY

All cases of a Domain take turns. `copy_us_more` is the growth of a turn's span over that turn's
plain one: XLA's own products, nothing copied (its plan still runs beside them). Medians, and
quartiles of the growth. The row "plain, again" is the noise: the plain case a second time.
`alone` rows time the shared expert in a program of its own, calls back to back, by the host's
clock.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import _report
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_iser

AXIS = "ep"
NUM_CALLS = 10  # of the shared expert alone


class Times(NamedTuple):
    """Microseconds of a call."""

    span: float
    shared: float
    copy: float
    layer: float


NOT_SIZES = ("json", "allow_dirty")  # of the arguments, which the results keep


class Case(NamedTuple):
    """What is timed."""

    balance: str
    sms: int | None
    is_again: bool = False


def arguments():
    parser = _report.parser(__doc__.splitlines()[0])
    add = parser.add_argument
    add("--platform", default="gpu", help="cpu tries the script where there is no GPU")
    add("--ranks", type=int, default=None, help="ranks (default: one a GPU)")
    add("--tokens", type=int, default=8192, help="tokens a rank")
    add("--hidden", type=int, default=7168)
    add("--intermediate", type=int, default=896, help="of a routed expert")
    add("--shared", type=int, default=3072, help="inner width of the shared expert")
    add("--experts", type=int, default=16)
    add("--top-k", type=int, default=2)
    add("--copy-sms", type=int, nargs="+", default=[8, 4, 16])
    add("--sms", type=int, nargs="+", default=[128, 124], help="budgets of the shared expert")
    add("--rules", nargs="+", default=["sami", "owner_direct"])
    add("--limit-s", type=float, default=75, help="no Domain is begun after this; others are told")
    parser.set_defaults(repeats=21)
    return parser.parse_args()


def make_operands(args, mesh, num_ranks):
    """x, ids, combine weights, expert planes and the shared expert's, on the mesh, in bf16."""
    sharded, replicated = NamedSharding(mesh, P(AXIS)), NamedSharding(mesh, P())
    rows = num_ranks * args.tokens
    rng = np.random.default_rng(0)

    @functools.partial(jax.jit, static_argnums=(1, 2), out_shardings=sharded)
    def normal(key, shape, scale):
        return (jax.random.normal(key, shape, jnp.float32) * scale).astype(jnp.bfloat16)

    keys = iter(jax.random.split(jax.random.key(0), 8))
    wide = (args.experts, args.intermediate, args.hidden)
    tall = (args.experts, args.hidden, args.intermediate)
    weights = jax_iser.ExpertWeights(
        normal(next(keys), wide, args.hidden**-0.5),
        normal(next(keys), wide, args.hidden**-0.5),
        normal(next(keys), tall, args.intermediate**-0.5),
    )
    shapes = ((args.shared, args.hidden),) * 2 + ((args.hidden, args.shared),)
    shared = [
        jax.device_put(normal(next(keys), shape, shape[1] ** -0.5), replicated) for shape in shapes
    ]
    popularity = np.ones(args.experts)
    popularity[: args.experts // num_ranks] = 12.0  # of rank 0
    scores = rng.random((rows, args.experts)) ** (1 / popularity)  # without replacement
    ids = np.argsort(-scores, axis=1)[:, : args.top_k].astype(np.int32)
    x = normal(next(keys), (rows, args.hidden), 1.0)
    topk_weights = np.full(ids.shape, 1 / args.top_k, np.float32)
    return x, *jax.device_put((ids, topk_weights), sharded), weights, shared


@functools.cache
def compiled(mesh, balance, sms):
    spec, plan_specs = P(AXIS), jax_iser.Plan(P(AXIS), *[P()] * 7)

    def layer(x, ids, topk_weights, weights, shared, handle):
        return jax_iser.moe_layer(
            x,
            ids,
            topk_weights,
            weights,
            handle,
            shared_expert=lambda t: jax_iser.shared_expert(t, *shared, sms=sms),
            balance=balance,
        )

    return jax.jit(
        jax.shard_map(
            layer,
            mesh=mesh,
            in_specs=(spec, spec, spec, spec, P(), spec),
            out_specs=(spec, plan_specs),
            check_vma=False,
        )
    )


def time_alone(args, mesh, x, shared, sms) -> float:
    """Microseconds of the shared expert in a program of its own."""
    call = jax.jit(
        jax.shard_map(
            lambda x, planes: jax_iser.shared_expert(x, *planes, sms=sms),
            mesh=mesh,
            in_specs=(P(AXIS), P()),
            out_specs=P(AXIS),
            check_vma=False,
        )
    )
    jax.block_until_ready(call(x, shared))
    times = []
    for _ in range(args.repeats):
        begin = time.perf_counter()
        for _ in range(NUM_CALLS):
            y = call(x, shared)
        jax.block_until_ready(y)
        times.append((time.perf_counter() - begin) / NUM_CALLS)
    return statistics.median(times) * 1e6


def run(mesh, operands, domain, balance, sms):
    y, plan = jax.block_until_ready(compiled(mesh, balance, sms)(*operands, domain.handle))
    if int(plan.status):
        domain.check()
    return y, plan


def last_call(domain, num_devices) -> Times:
    """Of the last call, of the slowest device."""
    rows = domain.timelines()
    newest = max(row.generation for row in rows)
    rows = [row for row in rows if row.generation == newest]
    if len(rows) != num_devices or not all(row.fused_called > row.started > 0 for row in rows):
        raise SystemExit(f"moments of call {newest} are missing: {rows}")
    shared = max(row.fused_called - row.started for row in rows)
    copy = max(row.copy_end - row.started for row in rows)
    layer = max(row.finished - row.started for row in rows)
    return Times(max(shared, copy) / 1e3, shared / 1e3, copy / 1e3, layer / 1e3)


def check_bits(mesh, operands, domain, sms):
    (off, _), (on, plan) = (run(mesh, operands, domain, b, sms) for b in ("none", "haloq"))
    same = jnp.array_equal(off.view(jnp.uint16), on.view(jnp.uint16))
    if not bool(same) or not bool(jnp.isfinite(on.astype(jnp.float32)).all()):
        raise SystemExit(f"outputs differ with sms={sms}: nothing was timed")
    return plan


def time_cases(args, mesh, operands, domain) -> dict[Case, list[Times]]:
    """Every case's calls; the cases take turns."""
    cases = [Case(balance, sms) for sms in (None, *args.sms) for balance in ("none", "haloq")]
    cases.insert(1, Case("none", None, is_again=True))
    seen = {case: [] for case in cases}
    for turn in range(args.repeats + 2):
        for case in cases:
            run(mesh, operands, domain, case.balance, case.sms)
            if turn >= 2:
                seen[case].append(last_call(domain, mesh.devices.size))
    return seen


def rows_of(seen, plan):
    """A row for each case."""
    plain = seen[Case("none", None)]
    for case, calls in seen.items():
        growth = [a.span - b.span for a, b in zip(calls, plain, strict=True)]
        low, middle, high = statistics.quantiles(growth, n=4)
        load = plan.load if case.balance == "haloq" else plan.load_before
        medians = Times(*(statistics.median(column) for column in zip(*calls, strict=True)))
        yield {
            "case": "plain, again" if case.is_again else case.balance,
            "shared_expert_sms": case.sms,
            "broadcasts": int(plan.num_broadcasts) if case.balance == "haloq" else 0,
            "imbalance": round(float(load.max() / load.mean()), 3),
            "copy_us_more": round(middle, 1),
            "copy_us_more_quartiles": [round(low, 1), round(high, 1)],
        } | {f"{name}_us": round(value, 1) for name, value in medians._asdict().items()}


def say_row(figures, row):
    figures.append(row)
    _report.say(json.dumps(row))


def make_domain(args, mesh, num_ranks, rule, copy_sms):
    return jax_iser.Domain(
        mesh,
        AXIS,
        ranks_per_device=num_ranks // mesh.devices.size,
        num_experts=args.experts,
        top_k=args.top_k,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        max_tokens_per_rank=args.tokens,
        min_group_size=1,
        dtype="bfloat16",
        copy_rule=rule,
        copy_sms=None if args.platform == "cpu" else copy_sms,
    )


def main():
    args = arguments()
    begin = time.monotonic()
    devices = jax.devices(args.platform)
    num_ranks = args.ranks or len(devices)
    if num_ranks % len(devices) or args.experts % num_ranks:
        raise SystemExit(f"{num_ranks} ranks on {len(devices)} devices, {args.experts} experts")
    mesh = Mesh(np.array(devices), (AXIS,))
    operands = make_operands(args, mesh, num_ranks)
    figures = []
    for sms in (None, *args.sms):
        alone = time_alone(args, mesh, operands[0], operands[-1], sms)
        say_row(figures, {"case": "alone", "shared_expert_sms": sms, "shared_us": round(alone, 1)})
    for copy_sms in args.copy_sms:
        for rule in args.rules:
            setting = {"rule": rule, "copy_sms": copy_sms}
            if time.monotonic() - begin > args.limit_s:
                say_row(figures, {"skipped": setting, "why": f"over {args.limit_s} s"})
                continue
            with make_domain(args, mesh, num_ranks, rule, copy_sms) as domain:
                plan = check_bits(mesh, operands, domain, args.sms[0])
                for row in rows_of(time_cases(args, mesh, operands, domain), plan):
                    say_row(figures, setting | row)
    kinds = [device.device_kind for device in devices]
    sizes = {name: value for name, value in vars(args).items() if name not in NOT_SIZES}
    document = {"devices": kinds, "sizes": sizes | {"ranks": num_ranks}, "rows": figures}
    _report.write(args, document, row_a_line=True)


if __name__ == "__main__":
    main()
