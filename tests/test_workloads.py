"""The eight workloads are what their names say, and depend on (workload, seed, step) alone."""

import numpy as np
import pytest

from jax_iser.replay.workloads import WORKLOADS, counts, topk_ids

SIZES = {"num_ranks": 8, "tokens_per_rank": 96, "num_experts": 32, "top_k": 4}


def rank_loads(workload, **options):
    ids = topk_ids(workload, **SIZES | options)
    return counts(ids, 32).sum(axis=0).reshape(8, 4).sum(axis=1)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_reproducible_and_distinct_experts_per_token(workload):
    ids = topk_ids(workload, **SIZES, seed=3, step=1)
    assert ids.dtype == np.int32
    assert ids.shape == (8, 96, 4)
    np.testing.assert_array_equal(ids, topk_ids(workload, **SIZES, seed=3, step=1))
    assert (ids != topk_ids(workload, **SIZES, seed=4, step=1)).any()
    assert (ids != topk_ids(workload, **SIZES, seed=3, step=2)).any()
    brought = ids[(ids >= 0).all(axis=-1)]
    assert (np.diff(np.sort(brought, axis=-1), axis=-1) > 0).all()
    assert (ids[(ids < 0).any(axis=-1)] == -1).all()
    assert ids.max() < 32


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize(("num_ranks", "num_experts", "top_k"), [(1, 1, 1), (33, 33, 2), (2, 4, 4)])
def test_any_size(workload, num_ranks, num_experts, top_k):
    ids = topk_ids(
        workload,
        num_ranks=num_ranks,
        tokens_per_rank=5,
        num_experts=num_experts,
        top_k=top_k,
    )
    assert ids.shape == (num_ranks, 5, top_k)
    assert counts(ids, num_experts).sum() == (ids >= 0).sum()


def test_counts_are_of_the_routes():
    ids = np.array([[[0, 3], [0, -1]], [[2, 7], [3, 0]]], np.int32)
    np.testing.assert_array_equal(counts(ids, 4), [[2, 0, 0, 1], [1, 0, 1, 1]])


def test_each_is_what_it_says():
    assert np.ptp(rank_loads("W0")) == 0
    totals = counts(topk_ids("W1", **SIZES), 32).sum(axis=0)
    assert np.sort(totals)[-4:].sum() > 0.5 * totals.sum()
    assert rank_loads("W2").max() > 0.5 * rank_loads("W2").sum()
    by_rank = counts(topk_ids("W3", **SIZES), 32).sum(axis=0).reshape(8, 4)
    assert (by_rank.max(axis=1) > 1.5 * np.sort(by_rank, axis=1)[:, -2]).all()
    sources = counts(topk_ids("W4", **SIZES), 32).sum(axis=1)
    assert sources.min() == 0
    assert sources.max() == 96 * 4
    zero = counts(topk_ids("W5", **SIZES), 32).sum(axis=0)
    assert (zero.reshape(8, 4).sum(axis=1) == 0).sum() == 1
    assert (zero == 0).sum() >= 4
    hot = [int(rank_loads("W6", step=s).argmax()) for s in range(10)]
    assert np.diff(hot).tolist() == [1 if rank < 7 else -7 for rank in hot[:-1]]
    assert [int(np.ptp(rank_loads("W7", step=s)) > 0) for s in range(6)] == [0, 1, 0, 0, 0, 1]


def test_unknown_workload():
    with pytest.raises(ValueError, match=r"workload='W8' is not one of W0, .*W7"):
        topk_ids("W8", **SIZES)
