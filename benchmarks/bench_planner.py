"""Planner: C++, JAX and the NumPy twin, and EPLB's rule in NumPy, on the same counts.

The counts are routes of 8,192 tokens a rank, top-6, over power-law popular experts in random
places. Plans are compared bit for bit before anything is timed. EPLB's rule plans from expert
totals onto the same slots, vectorised over layers. A plan at every layer call has one layer to go
by, since the next one's counts are not known yet: that is `eplb_numpy`. `eplb_numpy_61` is its
time a layer when the layers of a whole model come in one call, as for a static plan. `jax` is the
compiled planner of `method="portable"` on JAX's default device, one call per plan.
"""

from __future__ import annotations

import _report
import jax
import numpy as np

from jax_iser.methods.portable import plan as portable
from jax_iser.plan import counts as planner
from jax_iser.reference import planner as reference
from jax_iser.replay.eplb import rebalance_experts

TOKENS, TOP_K, EXPERTS, SLOTS, LAYERS = 8192, 6, 384, 4, 61


def make_counts(num_ranks: int, num_layers: int, rng) -> np.ndarray:
    """`[layers, ranks, experts] i32` counts with a popularity of exponent 0.8 in random places."""
    popularity = np.arange(1, EXPERTS + 1) ** -0.8
    rows = []
    for _ in range(num_layers):
        shares = rng.permutation(popularity / popularity.sum())
        rows.append(rng.multinomial(TOKENS * TOP_K, shares, size=num_ranks))
    return np.array(rows, np.int32)


def measure(num_ranks: int, repeats: int, rng) -> dict:
    """Microseconds a plan by each planner at one EP degree."""
    counts = make_counts(num_ranks, LAYERS, rng)
    plan_on_device = jax.jit(portable.plan_counts)
    on_device = [jax.device_put(layer) for layer in counts[:5]]
    for layer in counts[:3]:
        twin = reference.plan_counts(layer)
        for ours in (planner.plan_counts(layer), plan_on_device(layer)):
            for field, a, b in zip(twin._fields, ours, twin, strict=True):
                np.testing.assert_array_equal(a, b, field)
    totals = counts.sum(axis=1).astype(np.float64)
    replicas = EXPERTS + num_ranks * SLOTS
    cases = {
        "cpp": lambda: planner.plan_many(counts, num_helper_slots=SLOTS, num_threads=1),
        "jax": lambda: [jax.block_until_ready(plan_on_device(layer)) for layer in on_device],
        "numpy": lambda: [reference.plan_counts(layer) for layer in counts[:5]],
        "eplb_numpy": lambda: [
            rebalance_experts(totals[i : i + 1], replicas, 1, 1, num_ranks) for i in range(5)
        ],
        "eplb_numpy_61": lambda: rebalance_experts(totals, replicas, 1, 1, num_ranks),
    }
    seconds = _report.medians(cases, repeats)
    micros = {
        "cpp": seconds["cpp"] / LAYERS * 1e6,
        "jax": seconds["jax"] / 5 * 1e6,
        "numpy": seconds["numpy"] / 5 * 1e6,
        "eplb_numpy": seconds["eplb_numpy"] / 5 * 1e6,
        "eplb_numpy_61": seconds["eplb_numpy_61"] / LAYERS * 1e6,
    }
    batch = planner.plan_many(counts, num_helper_slots=SLOTS)
    mean = batch.load.mean(axis=1)
    return {
        "ep": num_ranks,
        "micros_per_plan": micros,
        "jax_over_cpp": micros["jax"] / micros["cpp"],
        "numpy_over_jax": micros["numpy"] / micros["jax"],
        "numpy_over_cpp": micros["numpy"] / micros["cpp"],
        "eplb_over_cpp": micros["eplb_numpy"] / micros["cpp"],
        "imbalance_off": float((batch.load_before.max(axis=1) / mean).mean()),
        "imbalance_on": float((batch.load.max(axis=1) / mean).mean()),
        "broadcasts": float(batch.num_broadcasts.mean()),
    }


def main() -> None:
    args = _report.parser(__doc__.splitlines()[0]).parse_args()
    rng = np.random.default_rng(0)
    rows = [measure(ranks, args.repeats, rng) for ranks in (4, 8, 16, 32, 64)]
    _report.say(f"E={EXPERTS}, S={SLOTS}, {TOKENS} tokens/rank, top-{TOP_K}; one thread; medians")
    _report.say(
        "us a plan:  C++    JAX   NumPy    EPLB  EPLB (61)  NumPy/C++  EPLB/C++  R off -> on"
    )
    for row in rows:
        us = row["micros_per_plan"]
        _report.say(
            f"EP{row['ep']:<4} {us['cpp']:9.2f} {us['jax']:6.0f} {us['numpy']:7.0f} "
            f"{us['eplb_numpy']:7.0f} {us['eplb_numpy_61']:10.0f} {row['numpy_over_cpp']:10.0f} "
            f"{row['eplb_over_cpp']:9.0f}  {row['imbalance_off']:.3f} -> {row['imbalance_on']:.3f}"
        )
    _report.write(args, {"experts": EXPERTS, "slots": SLOTS, "rows": rows})


if __name__ == "__main__":
    main()
