"""Who copies which bytes: seen while one rank stands still and the others go on."""

import threading
import time

import numpy as np
import pytest
from layers import assert_same_bits, bundle, jitted_layer, make_domain, make_problem, run_layer

from jax_iser.plan import group_levels

STALL_S = 1.5
SLICE_BYTES = 256 << 10
OWNER_DIRECT, SAMI = 0, 1


def slices_of(problem):
    """`(begin, end)` of the slices of a bundle: each plane is cut into its own."""
    slices = []
    for plane in problem.layout.planes:
        for at in range(0, plane.num_bytes, SLICE_BYTES):
            end = min(at + SLICE_BYTES, plane.num_bytes)
            slices.append((plane.offset + at, plane.offset + end))
    return slices


def copied_without(problem, plan, stalled, min_group_size):
    """By `(rank, helper, expert)`: which slices come although one rank copies nothing."""
    levels, found = group_levels(problem.num_ranks, min_group_size), {}
    num_slices = len(slices_of(problem))
    for row in plan.broadcasts[: plan.num_broadcasts]:
        expert, owner, level, group, helper, how = (int(value) for value in row)
        members = list(levels[level].members(group))
        copier = [members[j % len(members)] for j in range(num_slices)]
        if how == OWNER_DIRECT:
            copier = [owner] * num_slices
        for rank in set(members) - {owner}:
            found[rank, helper, expert] = [each != stalled for each in copier]
    return found


def slices_there(domain, problem, keys):
    """By key: which slices of the helper slot are the expert's."""
    found = {}
    for rank, helper, expert in keys:
        held, whole = domain.helper(rank, 0, helper), bundle(problem, expert)
        found[rank, helper, expert] = [held[a:b] == whole[a:b] for a, b in slices_of(problem)]
    return found


def wait_for_slices(domain, problem, expected, limit):
    """Reads until all that is expected is there; what was there then, and when it was read."""
    while True:
        found = slices_there(domain, problem, expected)
        now = time.monotonic()
        is_there = all(np.all(np.array(found[k])[expected[k]]) for k in expected)
        if is_there or now > limit:
            return found, now


CASES = [
    ("owner_direct", "owner", {"none"}),  # the hot rank owns all that is copied
    ("sami", "owner", {"all"}),  # no member of the groups that receive its experts
    ("sami", "member", {"all", "some"}),
    ("per_slot", "owner", {"all", "none"}),
    ("per_slot", "member", {"all", "some"}),
]


@pytest.mark.parametrize(("copy_rule", "who", "shares"), CASES)
def test_a_rank_that_stands_still_holds_up_its_own_slices_alone(copy_rule, who, shares):
    """Owner-direct: all of what it owns. SAMI: its share of what its groups receive."""
    # Planes of 300 KiB make two slices.
    problem = make_problem("W2", num_experts=32, top_k=4, tokens=8, hidden=150, intermediate=512)
    knobs = {"copy_rule": copy_rule, "min_group_size": 2}
    y, plan = run_layer(problem, **knobs)
    rows = plan.broadcasts[: plan.num_broadcasts]
    assert set(rows[:, 5]) == {"owner_direct": {0}, "sami": {1}, "per_slot": {0, 1}}[copy_rule]
    first = rows[rows[:, 5] == SAMI][0] if who == "member" else rows[0]
    stalled = int(first[3]) * (8 >> int(first[2])) if who == "member" else int(first[1])
    expected = copied_without(problem, plan, stalled, min_group_size=2)
    there = np.array(list(expected.values()))
    assert there.shape[1] == 6
    kinds = np.where(there.all(axis=1), "all", np.where(there.any(axis=1), "some", "none"))
    assert set(kinds) == shares
    with make_domain(problem, **knobs) as domain:
        domain.stall(stalled, "staging", STALL_S)
        results, begun = [], time.monotonic()
        call = threading.Thread(
            target=lambda: results.append(
                np.asarray(jitted_layer(domain.mesh)(*problem.operands, domain.handle)[0])
            )
        )
        call.start()
        found, read_at = wait_for_slices(domain, problem, expected, begun + 30)
        call.join(timeout=60)
    # It stood still from some moment of the call on, for so long.
    assert read_at < begun + STALL_S, "the others did not copy their slices without it"
    assert found == expected
    assert_same_bits(results[0], y)
