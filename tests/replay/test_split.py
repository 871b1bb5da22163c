"""Integer splits against brute force, route by route."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jax_iser.replay.split import even_split, fill_to, water_fill


@st.composite
def loads(draw):
    ranks = draw(st.integers(1, 7))
    load = draw(st.lists(st.integers(0, 30), min_size=ranks, max_size=ranks))
    allowed = draw(st.lists(st.booleans(), min_size=ranks, max_size=ranks))
    if not any(allowed):
        allowed[draw(st.integers(0, ranks - 1))] = True
    return np.array([load]), np.array([allowed]), draw(st.integers(0, 80))


@given(loads())
def test_water_fill_pours_one_route_at_a_time(case):
    load, allowed, amount = case
    taken = water_fill(load, np.array([amount]), allowed)[0]
    expected = np.zeros_like(taken)
    for _ in range(amount):
        level = np.where(allowed[0], load[0] + expected, np.iinfo(np.int64).max)
        expected[level.argmin()] += 1
    assert taken.sum() == amount
    assert not taken[~allowed[0]].any()
    assert sorted(load[0] + taken) == sorted(load[0] + expected)


@given(loads(), st.integers(0, 40))
def test_fill_to_takes_the_coldest_first(case, level):
    load, allowed, amount = case
    taken = fill_to(load, np.array([amount]), allowed, np.array([level]))[0]
    expected, left = np.zeros_like(taken), amount
    for rank in sorted(np.flatnonzero(allowed[0]), key=lambda r: (load[0, r], r)):
        expected[rank] = min(left, max(0, level - load[0, rank]))
        left -= expected[rank]
    assert taken.tolist() == expected.tolist()


@given(st.integers(0, 10_000), st.lists(st.integers(0, 3), min_size=1, max_size=6).filter(any))
def test_even_split_keeps_the_sum_and_the_proportion(total, weight):
    parts = even_split(np.array([total]), np.array([weight]))[0]
    assert parts.sum() == total
    exact = total * np.array(weight) / sum(weight)
    assert (abs(parts - exact) < 1).all()
    assert not parts[np.array(weight) == 0].any()


def test_even_split_gives_the_remainder_to_the_first():
    assert even_split(np.array([5]), np.array([[1, 1, 1]])).tolist() == [[2, 2, 1]]
