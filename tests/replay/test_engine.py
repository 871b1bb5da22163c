"""Metrics of the two paths, threads, blocks, and rows against figures worked out here."""

import doctest
import importlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_helpers import make_counts

from jax_iser.replay import engine
from jax_iser.replay.batch import Batch
from jax_iser.replay.engine import NothingToReplay, replay, why_not
from jax_iser.replay.metrics import Meter
from jax_iser.replay.policies import parse_policy
from jax_iser.replay.trace import Cut


class Memory:
    """A trace of given iterations."""

    def __init__(self, iterations):
        self.name, self.top_k, self.notes, self.iterations = "memory", 2, (), iterations
        self.num_layers, self.num_ranks, self.num_experts = iterations[0].shape

    def cut(self, num_ranks, tokens_per_rank):
        assert num_ranks == self.num_ranks
        return Cut(len(self.iterations), tokens_per_rank, ("note",), iter(self.iterations))


@settings(max_examples=40)
@given(
    seed=st.integers(0, 999),
    ranks=st.sampled_from([1, 2, 3, 4, 8]),
    slots=st.integers(1, 4),
    group=st.sampled_from([1, 2, 4]),
    min_routes=st.sampled_from([0, 7]),
    tokens=st.sampled_from([0, 5, 64]),
)
def test_measuring_in_cpp_equals_measuring_the_outcome(
    seed, ranks, slots, group, min_routes, tokens
):
    iterations = make_counts(seed, 5, 2, ranks, ranks * 3, tokens, 1)
    make = parse_policy(f"haloq:min_group_size={group}:min_routes={min_routes}")
    fast, slow = Meter(), Meter()
    short, long = make(slots=slots), make(slots=slots)
    long.measure = lambda batch: None
    for part in (iterations[:2], iterations[2:]):  # figures carry over between batches
        fast.run(short, Batch(part))
        slow.run(long, Batch(part))
    ours, theirs = fast.result(), slow.result()
    assert set(ours) == set(theirs)
    for name, values in theirs.items():
        np.testing.assert_allclose(ours[name], values, rtol=1e-12, err_msg=name)


def test_threads_and_blocks_change_nothing(monkeypatch):
    trace = Memory(make_counts(1, 7, 5, 8, 32, 64, 2))
    policies = [parse_policy(n) for n in ("none", "haloq", "haloq:resident=1", "eplb-past", "lplb")]
    expected, _ = replay(trace, 8, policies, num_threads=1)
    monkeypatch.setattr(engine, "BLOCK_BYTES", 1)
    found, _ = replay(trace, 8, policies, num_threads=3)
    for one, other in zip(expected, found, strict=True):
        figures = dict(other.figures, plans_per_s=one.figures["plans_per_s"])
        assert figures == pytest.approx(one.figures)


def test_a_row_by_hand():
    counts = np.zeros((1, 4, 8), np.int32)
    counts[0, :, 0] = [40, 0, 0, 0]  # all of rank 0's routes to its own expert
    counts[0, 1, 2:] = 0
    (off, on), cut = replay(
        Memory([counts, counts]), 4, [parse_policy("none"), parse_policy("haloq")]
    )
    assert (
        off.figures["imbalance"] == off.figures["imbalance_off"] == on.figures["imbalance_off"] == 4
    )
    figures = on.figures
    assert figures["imbalance"] == figures["imbalance_worst"] == 1
    assert figures["excess_removed"] == 1
    assert figures["remote_copies"] == 3
    assert (figures["owner_copies_p50"], figures["owner_copies_max"]) == (1, 1)
    # Rank 0 kept its 40 routes at home; now 30 leave, 10 to each other rank.
    assert (figures["send_max"], figures["recv_max"]) == (30, 10)
    assert figures["send_max_change"] is None  # from 0
    assert figures["groups_without_owner"] == 0
    assert figures["replicas_recur"] == 1
    assert figures["slots_used"] == figures["slots_used_max"] == 1
    assert cut.notes == ("note",)


def test_a_trace_without_routes_has_no_imbalance():
    trace = Memory([np.zeros((2, 4, 8), np.int32)])
    with pytest.raises(NothingToReplay, match="no route in the 1 iterations of memory"):
        replay(trace, 4, [parse_policy("haloq")])


@pytest.mark.parametrize("name", ["none", "haloq", "haloq:resident=1", "p2p", "eplb-whole"])
def test_calls_without_routes_are_in_no_figure(name):
    """A dense layer, and a layer that is idle in one iteration, beside the same without them."""
    iterations = make_counts(1, 3, 2, 4, 16, 64, 2)
    (expected,), _ = replay(Memory(iterations), 4, [parse_policy(name)])
    dense = [np.concatenate([counts, 0 * counts[:1]]) for counts in iterations]
    (found,), _ = replay(Memory(dense), 4, [parse_policy(name)])
    same = set(expected.figures) - {"layers", "calls_without_routes", "plans_per_s"}
    assert {key: found.figures[key] for key in same} == {key: expected.figures[key] for key in same}
    assert (found.figures["calls_without_routes"], expected.figures["calls_without_routes"]) == (
        3,
        0,
    )
    assert found.layers_off[:2].tolist() == expected.layers_off.tolist()
    assert np.isnan(found.layers_off[2])
    assert found.routes == expected.routes
    idle = [*iterations, 0 * iterations[0]]
    (found,), _ = replay(Memory(idle), 4, [parse_policy(name)])
    assert found.figures["calls_without_routes"] == 2
    assert found.figures["imbalance_off"] == expected.figures["imbalance_off"]


def test_more_routes_than_a_plan_takes_are_refused():
    with pytest.raises(ValueError, match="routes, and a plan takes at most"):
        replay(Memory(make_counts(1)), 4, [parse_policy("none")], tokens_per_rank=2**29)


def test_max_iterations():
    (row,), _ = replay(Memory(make_counts(1, 5)), 4, [parse_policy("none")], max_iterations=3)
    assert row.figures["iterations"] == 3


def test_json_fields_of_the_contract():
    (row,), _ = replay(Memory(make_counts(1, 2)), 4, [parse_policy("haloq")])
    wanted = (
        "trace ep slots policy min_group_size iterations layers calls_without_routes "
        "imbalance_off imbalance imbalance_worst excess_removed remote_copies "
        "owner_copies_p50 owner_copies_p99 "
        "owner_copies_max send_max_change recv_max_change groups_without_owner replicas_recur "
        "plans_per_s"
    )
    assert set(wanted.split()) <= set(row.figures)


@pytest.mark.parametrize(
    ("experts", "ranks", "reason"),
    [(384, 7, "384 experts do not divide over 7"), (96, 96, "1..72"), (2048, 4, "above 1024")],
)
def test_why_an_ep_degree_is_skipped(experts, ranks, reason):
    assert reason in why_not(experts, ranks)
    assert why_not(384, 24) is None


@pytest.mark.parametrize("name", ["policies", "time_model", "tokens_of_counts", "workloads"])
def test_examples_in_docstrings(name):
    module = importlib.import_module(f"jax_iser.replay.{name}")
    names = {"np": np, **vars(module)}
    failed, tried = doctest.testmod(module, globs=names)
    assert tried
    assert not failed
