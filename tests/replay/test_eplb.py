"""DeepSeek's EPLB: the golden output of its README, and what must hold of any plan."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_iser.replay.eplb import balanced_packing, rebalance_experts

WEIGHT = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
GOLDEN = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


def test_golden_output():
    phy2log, _, logcnt = rebalance_experts(WEIGHT, 16, 4, 2, 8)
    assert phy2log.tolist() == GOLDEN
    assert logcnt.sum(axis=1).tolist() == [16, 16]


@given(st.integers(0, 999), st.sampled_from([(8, 4), (12, 4), (12, 6)]), st.integers(0, 3))
def test_maps_agree(seed, sizes, slots):
    experts, gpus = sizes
    weight = np.random.default_rng(seed).integers(0, 100, (3, experts))
    replicas = experts + slots * gpus
    phy2log, log2phy, logcnt = rebalance_experts(weight, replicas, 1, 1, gpus)
    assert (logcnt >= 1).all()
    for layer in range(3):
        assert np.bincount(phy2log[layer], minlength=experts).tolist() == logcnt[layer].tolist()
        for expert in range(experts):
            places = log2phy[layer, expert, : logcnt[layer, expert]]
            assert (phy2log[layer, places] == expert).all()
            assert (log2phy[layer, expert, logcnt[layer, expert] :] == -1).all()


def test_packing_ties_go_to_the_lower_pack():
    pack, place = balanced_packing(np.array([[5, 5, 5, 5]]), 2)
    assert pack.tolist() == [[0, 1, 0, 1]]
    assert place.tolist() == [[0, 0, 1, 1]]


def test_sizes_that_do_not_divide_are_named():
    with pytest.raises(ValueError, match="num_replicas=17"):
        rebalance_experts(WEIGHT, 17, 1, 1, 8)
    with pytest.raises(ValueError, match="below the 12 experts"):
        rebalance_experts(WEIGHT, 8, 1, 1, 8)
    with pytest.raises(ValueError, match="5 items"):
        balanced_packing(np.ones((1, 5)), 2)
