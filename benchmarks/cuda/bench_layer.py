"""The layer in JAX on GPUs: copies beside the shared expert, and the whole layer OFF and ON.

    python3 benchmarks/cuda/bench_layer.py --json OUT.json    # all GPUs there are, one rank each
    python3 benchmarks/cuda/bench_layer.py --ranks 8          # more ranks than GPUs share them

Rank 0's experts are hot: at the defaults four of them (38.5 MB each) are copied. Before anything
is timed ON is compared with OFF to the bit. From `Domain.timelines()`, by device and call:

  span   from start to the later of the shared expert's end and the end of the copies, us
  layer  from start to the finished output, us

`copy_us_more` is the span's growth over the plain XLA shared expert without copies, which runs in
turn with every other case; all numbers are medians over calls of the slowest device's.
"""

from __future__ import annotations

import functools
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import _report
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_iser

AXIS = "ep"


def arguments():
    parser = _report.parser(__doc__.splitlines()[0])
    add = parser.add_argument
    add("--ranks", type=int, default=None, help="ranks (default: one a GPU)")
    add("--tokens", type=int, default=8192, help="tokens a rank")
    add("--hidden", type=int, default=7168)
    add("--intermediate", type=int, default=896, help="of a routed expert")
    add("--shared", type=int, default=3072, help="inner width of the shared expert")
    add("--experts", type=int, default=16)
    add("--top-k", type=int, default=2)
    add("--copy-sms", type=int, nargs="+", default=[4, 8, 16])
    add("--sms", type=int, nargs="+", default=[124, 128], help="budgets of the shared expert")
    add("--rules", nargs="+", default=["owner_direct", "sami"])
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


def run(mesh, operands, domain, balance, sms):
    y, plan = jax.block_until_ready(compiled(mesh, balance, sms)(*operands, domain.handle))
    if int(plan.status):
        domain.check()
    return y, plan


def last_call(domain) -> tuple[float, float]:
    """(span, layer) of the last call, us, of the slowest device."""
    rows = domain.timelines()
    newest = max(row.generation for row in rows)
    rows = [row for row in rows if row.generation == newest]
    span = max(max(row.fused_called, row.copy_end) - row.started for row in rows)
    return span / 1e3, max(row.finished - row.started for row in rows) / 1e3


def check_bits(mesh, operands, domain, sms):
    (off, _), (on, plan) = (run(mesh, operands, domain, b, sms) for b in ("none", "haloq"))
    same = jnp.array_equal(off.view(jnp.uint16), on.view(jnp.uint16))
    if not bool(same) or not bool(jnp.isfinite(on.astype(jnp.float32)).all()):
        raise SystemExit(f"outputs differ with sms={sms}: nothing was timed")
    return plan


def time_cases(args, mesh, operands, domain):
    """Medians of (span, layer) by (balance, sms); the cases take turns."""
    cases = [(balance, sms) for sms in (None, *args.sms) for balance in ("none", "haloq")]
    seen = {case: [] for case in cases}
    for turn in range(args.repeats + 2):
        for case in cases:
            run(mesh, operands, domain, *case)
            if turn >= 2:
                seen[case].append(last_call(domain))
    return {
        case: tuple(statistics.median(column) for column in zip(*values, strict=True))
        for case, values in seen.items()
    }


def main():
    args = arguments()
    devices = jax.devices("gpu")
    num_ranks = args.ranks or len(devices)
    mesh = Mesh(np.array(devices), (AXIS,))
    operands = make_operands(args, mesh, num_ranks)
    figures = []
    for rule in args.rules:
        for copy_sms in args.copy_sms:
            with jax_iser.Domain(
                mesh,
                AXIS,
                ranks_per_device=num_ranks // len(devices),
                num_experts=args.experts,
                top_k=args.top_k,
                hidden_size=args.hidden,
                intermediate_size=args.intermediate,
                max_tokens_per_rank=args.tokens,
                min_group_size=1,
                dtype="bfloat16",
                copy_rule=rule,
                copy_sms=copy_sms,
            ) as domain:
                plan = check_bits(mesh, operands, domain, args.sms[0])
                times = time_cases(args, mesh, operands, domain)
            plain = times["none", None][0]
            for (balance, sms), (span, layer) in times.items():
                row = {
                    "rule": rule,
                    "copy_sms": copy_sms,
                    "shared_expert_sms": sms,
                    "balance": balance,
                    "broadcasts": int(plan.num_broadcasts) if balance == "haloq" else 0,
                    "imbalance": float(plan.load_before.max() / plan.load_before.mean())
                    if balance == "none"
                    else float(plan.load.max() / plan.load.mean()),
                    "span_us": span,
                    "copy_us_more": span - plain,
                    "layer_us": layer,
                }
                figures.append(row)
                _report.say(row)
    kinds = [device.device_kind for device in devices]
    _report.write(
        args, {"devices": kinds, "sizes": vars(args) | {"ranks": num_ranks}, "rows": figures}
    )


if __name__ == "__main__":
    main()
