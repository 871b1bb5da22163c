"""Counts, knobs and routes that the tests of every planner share."""

import random

import numpy as np
from hypothesis import strategies as st

from jax_iser.reference import planner as twin
from jax_iser.replay import workloads

RANKS = (1, 2, 3, 4, 6, 8, 16, 24, 33, 72)
KNOBS = ("num_helper_slots", "min_group_size", "min_routes", "gain_threshold", "copy_rule")


def random_counts(num_ranks, home, kind, seed) -> np.ndarray:
    """`[P, E] i32` counts: of a workload, or of a random matrix."""
    rng = np.random.default_rng(seed)
    num_experts = num_ranks * home
    if kind in workloads.WORKLOADS:
        ids = workloads.topk_ids(
            kind,
            num_ranks=num_ranks,
            tokens_per_rank=int(rng.integers(1, 60)),
            num_experts=num_experts,
            top_k=min(num_experts, int(rng.integers(1, 5))),
            seed=seed,
            step=int(rng.integers(8)),
        )
        return workloads.counts(ids, num_experts)
    shape = (num_ranks, num_experts)
    if kind == "sparse":
        return (rng.integers(0, 50, shape) * (rng.random(shape) < 0.1)).astype(np.int32)
    if kind == "heavy":  # products and sums of these leave 32 bits
        scale = (2**31 - 1) // (num_ranks * num_experts)
        return rng.integers(0, max(1, scale) + 1, shape).astype(np.int32)
    if kind == "ties":
        return rng.integers(0, 3, shape).astype(np.int32)
    assert kind == "skewed"
    return (rng.pareto(0.6, shape) * 5).clip(0, 10**6).astype(np.int32)


@st.composite
def cases(draw, ranks=RANKS):
    """`(counts, knobs)`."""
    num_ranks = draw(st.sampled_from(ranks))
    kind = draw(st.sampled_from([*workloads.WORKLOADS, "sparse", "heavy", "ties", "skewed"]))
    home = draw(st.integers(1, min(6, 1024 // num_ranks)))
    counts = random_counts(num_ranks, home, kind, draw(st.integers(0, 2**32 - 1)))
    knobs = {
        "num_helper_slots": draw(st.sampled_from([0, 1, 2, 3, 4, 7, 16])),
        "min_group_size": draw(st.sampled_from([1, 2, 4])),
        "min_routes": draw(st.sampled_from([0, 0, 1, 5, 40])),
        "gain_threshold": draw(st.sampled_from([0, 0, 1000, 1100, 2500])),
        "copy_rule": draw(st.sampled_from(twin.COPY_RULES)),
    }
    return counts, knobs


def fixed_counts(seed, num_ranks, home):
    """Counts that no version of NumPy changes: a few hot experts, many small and equal numbers."""
    rng = random.Random(seed)
    heat = [rng.choice((0, 1, 1, 2, 2, 3, 9, 40)) for _ in range(num_ranks * home)]
    rows = [[rng.randint(0, 2) * h + rng.choice((0, h)) for h in heat] for _ in range(num_ranks)]
    return np.array(rows, np.int32)


FIXED = [  # (ranks, home experts, helper slots, least group, min_routes, threshold, copy rule)
    (4, 3, 2, 1, 0, 0, "per_slot"),
    (8, 4, 4, 4, 0, 0, "owner_direct"),
    (8, 4, 3, 1, 0, 0, "per_slot"),
    (8, 2, 1, 2, 5, 0, "sami"),
    (12, 3, 4, 1, 0, 1200, "per_slot"),
    (16, 4, 4, 2, 3, 0, "per_slot"),
    (24, 2, 2, 1, 0, 0, "per_slot"),
    (33, 2, 4, 4, 0, 1050, "per_slot"),
]
# Of the plans of 25 seeds each. They are part of the contract: ranks with different versions of
# the package must not differ, and a plan once published stays what it is.
FIXED_DIGESTS = [
    "b297693f445ff9fd",
    "8a93a489d4f763f9",
    "f72b4eaff96ecd4c",
    "271dad08393ac596",
    "806c11f6ef9a9d20",
    "9faefe0bd8ce7d10",
    "83488bdd812a9f09",
    "76d4bf1ffb4df927",
]


def make_ids(num_ranks, home, workload, seed):
    rng = np.random.default_rng(seed)
    num_experts = num_ranks * home
    ids = workloads.topk_ids(
        workload,
        num_ranks=num_ranks,
        tokens_per_rank=int(rng.integers(0, 24)),
        num_experts=num_experts,
        top_k=min(num_experts, int(rng.integers(1, 4))),
        seed=seed,
    )
    outside = rng.random(ids.shape) < 0.1
    strange = rng.choice([-1, -(2**31), num_experts, 2**31 - 1], ids.shape)
    return np.where(outside, strange, ids).astype(np.int32)
