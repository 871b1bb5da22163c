"""The whole layer, plan to combine, on CPU ranks; and the same layer on `lax.ragged_dot`.

D=512, I=1024, E=32, top-4, 4,096 tokens over eight ranks. Results are compared first: ON with OFF
to the bit, both with the `ragged_dot` layer within 1e-4 of its largest output. Then all cases run
in turn, round by round: OFF and ON under balanced and under skewed routing, `ragged_dot`, and dense
f32 products in NumPy and in XLA, whose better rate is the yardstick. `copy` compares the rules for
copies by the time from the plan to READY on the slowest device.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import statistics

import _report
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jax_iser

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, TOKENS, RANKS = 512, 1024, 32, 4, 4096, 8
FLOPS = 6 * HIDDEN * INTERMEDIATE * TOKENS * TOP_K
DENSE = 2048


def make_operands(dtype, rng):
    """Tokens, weights of the combine and of the experts, and two routings."""
    shapes = ((EXPERTS, INTERMEDIATE, HIDDEN),) * 2 + ((EXPERTS, HIDDEN, INTERMEDIATE),)
    weights = [(rng.standard_normal(shape) * 0.05).astype(dtype) for shape in shapes]
    popularity = np.arange(1, EXPERTS + 1) ** -0.5
    popularity /= popularity.sum()
    skewed = [rng.choice(EXPERTS, TOP_K, replace=False, p=popularity) for _ in range(TOKENS)]
    balanced = (np.arange(TOKENS)[:, None] * TOP_K + np.arange(TOP_K)) % EXPERTS
    return {
        "x": rng.standard_normal((TOKENS, HIDDEN)).astype(dtype),
        "topk_weights": rng.random((TOKENS, TOP_K)).astype(np.float32),
        "weights": weights,
        "skewed": np.array(skewed, np.int32),
        "balanced": balanced.astype(np.int32),
    }


def make_layer(mesh, balance):
    """The jitted layer over the mesh: (x, topk_ids, topk_weights, weights, handle) -> y, plan."""
    spec = PartitionSpec("ep")
    plan_specs = jax_iser.Plan(spec, *[PartitionSpec()] * 7)

    def layer(x, topk_ids, topk_weights, weights, handle):
        weights = jax_iser.ExpertWeights(*weights)
        return jax_iser.moe_layer(x, topk_ids, topk_weights, weights, handle, balance=balance)

    return jax.jit(
        jax.shard_map(
            layer, mesh=mesh, in_specs=spec, out_specs=(spec, plan_specs), check_vma=False
        )
    )


@jax.jit
def ragged_layer(x, topk_ids, topk_weights, weights):
    """The layer with all experts on one device, on `lax.ragged_dot`."""
    gate, up, down = weights
    order = jnp.argsort(topk_ids.reshape(-1))
    sizes = jnp.bincount(topk_ids.reshape(-1), length=EXPERTS).astype(jnp.int32)
    rows = x[order // TOP_K]
    transposed = [jnp.swapaxes(plane, 1, 2) for plane in (gate, up, down)]
    dot = jax.lax.ragged_dot
    h = jax.nn.silu(dot(rows, transposed[0], sizes)) * dot(rows, transposed[1], sizes)
    out = jnp.zeros((TOKENS * TOP_K, HIDDEN), x.dtype).at[order].set(dot(h, transposed[2], sizes))
    return jnp.einsum("tkd,tk->td", out.reshape(TOKENS, TOP_K, HIDDEN), topk_weights)


def measure_layer(dtype, ranks_per_device, repeats, rng) -> dict:
    """Seconds of every case, and the ratios the project is held against."""
    devices = RANKS // ranks_per_device
    mesh = jax.make_mesh(
        (devices,),
        ("ep",),
        devices=jax.devices()[:devices],
        axis_types=(jax.sharding.AxisType.Auto,),
    )
    host = make_operands(dtype, rng)
    operands = jax.device_put(host, NamedSharding(mesh, PartitionSpec("ep")))
    with make_domain(mesh, ranks_per_device, dtype) as domain:
        layers = {name: make_layer(mesh, balance) for name, balance in ARMS.items()}

        def run(name, routing):
            names = ("x", routing, "topk_weights", "weights")
            y, plan = layers[name](*(operands[key] for key in names), domain.handle)
            return np.asarray(y), plan

        check(run, host)
        # Each round begins untimed: ragged_dot, the last case, leaves cold memory behind.
        cases = {"warm-up": lambda: run("on", "balanced")}
        cases |= {
            f"{name} {routing}": lambda name=name, routing=routing: run(name, routing)
            for routing in ("balanced", "skewed")
            for name in ARMS
        }
        cases |= dense_cases(rng)
        if dtype == "float32" and ranks_per_device == 1:
            on_one = jax.device_put(host, jax.devices()[0])
            arguments = [on_one[k] for k in ("x", "balanced", "topk_weights", "weights")]
            cases["ragged_dot"] = lambda: ragged_layer(*arguments).block_until_ready()
        seconds = _report.medians(cases, repeats)
        del seconds["warm-up"]
        plan = run("on", "skewed")[1]
        domain.check()
    return summarize(dtype, ranks_per_device, seconds, plan)


ARMS = {"off": "none", "on": "haloq"}


def make_domain(mesh, ranks_per_device, dtype, **knobs):
    return jax_iser.Domain(
        mesh,
        "ep",
        ranks_per_device=ranks_per_device,
        num_experts=EXPERTS,
        top_k=TOP_K,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        max_tokens_per_rank=TOKENS // RANKS,
        dtype=dtype,
        **knobs,
    )


def check(run, host) -> None:
    """Raises unless ON equals OFF to the bit and both agree with `ragged_dot`."""
    for routing in ("balanced", "skewed"):
        off, on = run("off", routing)[0], run("on", routing)[0]
        assert off.tobytes() == on.tobytes(), f"replicas changed the output under {routing} routing"
        if off.dtype == np.float32 and routing == "skewed":
            arguments = (host["x"], host[routing], host["topk_weights"], host["weights"])
            expected = np.asarray(ragged_layer(*arguments))
            np.testing.assert_allclose(off, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def dense_cases(rng) -> dict:
    a, b = rng.standard_normal((2, DENSE, DENSE)).astype(np.float32)
    on_device = jax.device_put((a, b), jax.devices()[0])
    dot = jax.jit(jnp.dot)
    return {"numpy": lambda: a @ b, "xla": lambda: dot(*on_device).block_until_ready()}


def summarize(dtype, ranks_per_device, seconds, plan) -> dict:
    dense_rate = 2 * DENSE**3 / min(seconds["numpy"], seconds["xla"])
    ratios = {
        "layer_over_dense_rate": FLOPS / seconds["on balanced"] / dense_rate,
        "on_over_off_balanced": seconds["on balanced"] / seconds["off balanced"],
        "on_over_off_skewed": seconds["on skewed"] / seconds["off skewed"],
    }
    if "ragged_dot" in seconds:
        ratios["ragged_dot_over_layer"] = seconds["ragged_dot"] / seconds["on balanced"]
    mean = np.asarray(plan.load).mean()
    return {
        "dtype": dtype,
        "ranks_per_device": ranks_per_device,
        "seconds": seconds,
        "ratios": ratios,
        "imbalance_off": float(np.max(plan.load_before) / mean),
        "imbalance_on": float(np.max(plan.load) / mean),
    }


def measure_copy(repeats, rng) -> list[dict]:
    """From the plan to READY on the slowest device, by copy rule, under skewed routing."""
    mesh = jax.make_mesh((RANKS,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    host = make_operands("float32", rng)
    operands = jax.device_put(host, NamedSharding(mesh, PartitionSpec("ep")))
    layer = make_layer(mesh, "haloq")
    rules = ("owner_direct", "sami", "per_slot")
    times = {rule: [] for rule in rules}
    for _ in range(repeats):
        for rule in rules:
            with make_domain(mesh, 1, "float32", copy_rule=rule) as domain:
                arguments = [operands[k] for k in ("x", "skewed", "topk_weights", "weights")]
                for _ in range(2):
                    jax.block_until_ready(layer(*arguments, domain.handle))
                last = domain.timelines()[-RANKS:]
                planned = min(t.planned for t in last)
                times[rule].append((max(t.copy_end for t in last) - planned) / 1e9)
    return [{"copy_rule": rule, "seconds": statistics.median(times[rule])} for rule in rules]


def main() -> None:
    args = _report.parser(__doc__.splitlines()[0]).parse_args()
    rng = np.random.default_rng(0)
    rows = [
        measure_layer("float32", 1, args.repeats, rng),
        measure_layer("float32", 8, args.repeats, rng),
        measure_layer("bfloat16", 8, args.repeats, rng),
    ]
    for row in rows:
        _report.say(f"{row['dtype']}, {row['ranks_per_device']} ranks a device")
        for name, value in row["seconds"].items():
            _report.say(f"  {name:14} {value * 1e3:9.1f} ms")
        for name, value in row["ratios"].items():
            _report.say(f"  {name:24} {value:6.3f}")
    copies = measure_copy(args.repeats, rng)
    for row in copies:
        _report.say(f"copy, {row['copy_rule']:13} {row['seconds'] * 1e3:9.2f} ms")
    _report.write(args, {"flops": FLOPS, "rows": rows, "copy": copies})


if __name__ == "__main__":
    main()
