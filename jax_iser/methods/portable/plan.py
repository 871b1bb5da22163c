"""HALO-Q in `jax.numpy`: the plan of a layer call, made on the device, without a host callback.

Equal to the NumPy twin (`jax_iser.reference.planner`) to the bit, with one function per stage. All
arithmetic is in i32 with x64 on or off, because no sum of a plan exceeds the number of routes,
which is below 2**31; the only wider product is the one of `gain_threshold`. Placement is one
`while_loop` with a step per candidate, and repair is one loop with a step per ring of the
tournament, so compile time does not grow with ranks or experts. Everything works under `jit`,
`vmap`, `shard_map` and `lax.scan`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_iser.plan.groups import GroupLevel, group_levels
from jax_iser.plan.knobs import check_plan_knobs
from jax_iser.plan.types import OWNER_DIRECT, RESIDENT, SAMI, CountsPlan

MAX_ROUTES = 2**31 - 1
MAX_KEYS = 2**31  # that i32 tells apart
# Of the broadcasts that a rank can host: a short chain of minima is faster than a running sum.
MAX_UNROLLED = 8


class Groups(NamedTuple):
    """All aligned groups as NumPy constants, the finest level first, in order within a level.

    Attributes:
      level, number: `[G]`, the level of each group and its number within the level.
      members: `[G, P]` bool.
    """

    level: np.ndarray
    number: np.ndarray
    members: np.ndarray

    @classmethod
    def of(cls, levels: tuple[GroupLevel, ...], num_ranks: int) -> Groups:
        """The groups of `group_levels`' result."""
        every = [(each, group) for each in reversed(levels) for group in range(each.num_groups)]
        ranks = np.arange(num_ranks)
        return cls(
            np.array([each.level for each, _ in every], np.int32),
            np.array([group for _, group in every], np.int32),
            np.array([ranks // each.group_size == group for each, group in every]),
        )

    @property
    def contains(self) -> np.ndarray:
        """`[G, G]` bool, whether group i is a proper superset of group j."""
        held = (self.members[:, None] >= self.members).all(-1)
        return held & (self.level[:, None] < self.level)


class _Placement(NamedTuple):
    """State of stage 2. A row is a broadcast, in placement order; rows not yet in use are -1.

    Attributes:
      load: `[P]`, routes by computing rank.
      num_exports: `[P]`, candidates that each rank has used up.
      frozen: `[P]` bool.
      num_placed: `[G]`, broadcasts into each group.
      num_rows: `[]`.
      rows: `[M, 3]`, expert, group as an index into `Groups`, broadcasts into that group before.
      quota: `[M, P]`.
    """

    load: jax.Array
    num_exports: jax.Array
    frozen: jax.Array
    num_placed: jax.Array
    num_rows: jax.Array
    rows: jax.Array
    quota: jax.Array


def _sum(array, axis=None):
    return jnp.sum(array, axis=axis, dtype=jnp.int32)


def _argmax(array):
    return lax.argmax(array, array.ndim - 1, jnp.int32)


def _running_sum(array, axis):
    return lax.cumsum(array, axis=axis % array.ndim)


def _wide_product(a, b):
    """The 64-bit product of two u32, as (high, low) u32."""
    a, b = jnp.asarray(a).astype(jnp.uint32), jnp.asarray(b).astype(jnp.uint32)
    low_half = np.uint32(0xFFFF)
    a_high, a_low, b_high, b_low = a >> 16, a & low_half, b >> 16, b & low_half
    cross, crossed = a_low * b_high, a_high * b_low
    middle = (a_low * b_low >> 16) + (cross & low_half) + (crossed & low_half)
    high = a_high * b_high + (cross >> 16) + (crossed >> 16) + (middle >> 16)
    return high, a * b


def _gains(before, total, gain_threshold):
    """Whether `1000 * P * max(load) >= gain_threshold * sum(load)`, exactly."""
    high, low = _wide_product(np.uint32(1000 * before.size), jnp.max(before))
    least_high, least_low = _wide_product(np.uint32(gain_threshold), total)
    return (high > least_high) | ((high == least_high) & (low >= least_low))


def _choose_group(room, amount, groups: Groups):
    """The roomiest group of the finest level that takes `amount`, else the roomiest of all.

    Args:
      room: `[G]` i32, 0 where a member has no free slot.
    """
    takes = (room >= amount) & (room > 0)
    finest = jnp.max(jnp.where(takes, groups.level, -1))
    return _argmax(jnp.where((finest < 0) | (groups.level == finest), room, -1))


def _fill(load, members, amount, target):
    """Routes that each member takes of `amount`: the coldest first, each up to the target."""
    rank = np.arange(load.size, dtype=np.int32)
    spare = jnp.where(members, jnp.maximum(target - load, 0), 0)
    colder = (load < load[:, None]) | ((load == load[:, None]) & (rank < rank[:, None]))
    before = _sum(jnp.where(colder, spare, 0), axis=1)
    return jnp.clip(amount - before, 0, spare)


def place(totals, before, target, gains, *, num_helper_slots, min_routes, groups):
    """Stage 2: which experts are copied into which groups, and who computes how much of them.

    Args:
      totals, before: `[E]` and `[P]` i32, routes by expert and by home rank.
      target: `[]` i32, the water level.
      gains: `[]` bool; nothing is placed where it is False.

    Returns:
      The final `_Placement`.
    """
    num_ranks, home = before.size, totals.size // before.size
    most = min(num_helper_slots, home)
    by_weight = jnp.argsort(-totals.reshape(num_ranks, home), axis=1, stable=True)[:, :most]
    candidates = by_weight.astype(jnp.int32)
    ranks = np.arange(num_ranks, dtype=np.int32)

    def movable(state):
        return jnp.where(state.frozen | (state.num_exports >= most), 0, state.load)

    def can_go_on(state):
        return gains & (jnp.max(movable(state)) > target)

    def step(state):
        owner = _argmax(movable(state))
        expert = owner * home + candidates[owner, state.num_exports[owner]]
        is_owner = ranks == owner
        amount = jnp.minimum(state.load[owner] - target, totals[expert])
        spare = jnp.where(is_owner, 0, jnp.maximum(target - state.load, 0))
        is_full = _slots_used(state.num_placed, groups) >= num_helper_slots
        room = _sum(jnp.where(groups.members, spare, 0), axis=1)
        room = jnp.where((groups.members & is_full).any(axis=1), 0, room)
        group = _choose_group(room, amount, groups)
        can_move = jnp.minimum(amount, room[group])
        is_placed = (can_move > 0) & (can_move >= min_routes)
        members = jnp.asarray(groups.members)[group]
        moved = _fill(state.load, members & ~is_owner, amount, target)
        moved = jnp.where(is_placed, moved, 0)
        quota = jnp.where(is_owner, totals[expert] - can_move, moved)
        row = jnp.stack([expert, group, state.num_placed[group]])
        at = state.num_rows
        return _Placement(
            load=state.load + moved - jnp.where(is_owner & is_placed, can_move, 0),
            num_exports=state.num_exports + is_owner,
            frozen=state.frozen | (is_owner & (can_move == 0)),
            num_placed=state.num_placed + ((np.arange(len(room)) == group) & is_placed),
            num_rows=at + is_placed,
            rows=_set_row(state.rows, at, row, is_placed),
            quota=_set_row(state.quota, at, quota, is_placed),
        )

    # Zeros that depend on the counts: shard_map types a loop's state by what it varies over.
    zero = target * 0
    num_rows, num_groups = num_ranks * most, len(groups.level)
    state = _Placement(
        load=before,
        num_exports=jnp.zeros(num_ranks, jnp.int32) + zero,
        frozen=(jnp.zeros(num_ranks, jnp.int32) + zero) > 0,
        num_placed=jnp.zeros(num_groups, jnp.int32) + zero,
        num_rows=zero,
        rows=jnp.full((num_rows, 3), -1, jnp.int32) + zero,
        quota=jnp.zeros((num_rows, num_ranks), jnp.int32) + zero,
    )
    return lax.while_loop(can_go_on, step, state) if most else state


def _set_row(table, at, row, is_set):
    """The table with its row `at` replaced where `is_set`; a full table keeps its last row."""
    old = lax.dynamic_index_in_dim(table, at, keepdims=False)
    return lax.dynamic_update_index_in_dim(table, jnp.where(is_set, row, old), at, 0)


def _slots_used(num_placed, groups: Groups):
    """Helper slots that each rank has spent, `[P]`."""
    return _sum(jnp.where(groups.members, num_placed[:, None], 0), axis=0)


def color_slots(placement: _Placement, groups: Groups):
    """Stage 3: the lowest helper index free on all members, `[M]` i32.

    Groups are nested or disjoint and coarse ones come first. So what is taken on a member is taken
    on all, and the lowest free index is the number of broadcasts into larger groups around this
    one, plus those into this one before.
    """
    around = _sum(jnp.where(groups.contains, placement.num_placed[:, None], 0), axis=0)
    return around[placement.rows[:, 1]] + placement.rows[:, 2]


def _trade(taker, giver):
    """What `taker` takes less what it gives, by shared broadcast in placement order.

    Args:
      taker, giver: `[W, N/2]` i32, each rank's quota less its own routes; 0 if not shared.
    """
    take = jnp.minimum(jnp.maximum(-taker, 0), jnp.maximum(giver, 0))
    give = jnp.maximum(taker, 0)
    traded = jnp.minimum(_sum(take, axis=0), _sum(give, axis=0))
    return _first(take, traded) - _first(give, traded)


def _first(amounts, total):
    """The amounts, in the order of axis 0, until they sum to `total`."""
    if len(amounts) > MAX_UNROLLED:
        before = _running_sum(amounts, 0) - amounts
        return jnp.clip(total - before, 0, amounts)
    taken, left = [], total
    for amount in amounts:
        taken.append(jnp.minimum(amount, left))
        left = left - taken[-1]
    return jnp.stack(taken)


def _play_ring(extra, held):
    """Trades of the pairs of one ring, which are disjoint: both directions, one after the other.

    Args:
      extra: `[W, N]` i32, quota less own routes of the broadcasts that each rank hosts, ranks in
        the order of the ring.
      held: `[W, N]` i32, which broadcasts these are, in placement order.
    """
    half = extra.shape[1] // 2
    left, right = extra[:, :half], jnp.flip(extra[:, half:], 1)
    # Entries that hold no broadcast match one another too, and trade nothing: their extra is 0.
    is_same = held[:, None, :half] == jnp.flip(held[None, :, half:], 2)
    ours = jnp.where(is_same.any(axis=1), left, 0)
    theirs = _sum(jnp.where(is_same, right, 0), axis=1)
    there = _trade(ours, theirs)
    back = _trade(theirs - there, ours + there)
    net = there - back
    right = right - _sum(jnp.where(is_same, net[:, None], 0), axis=0)
    return jnp.concatenate([left + net, jnp.flip(right, 1)], axis=1)


def repair(counts, experts, hosts, quota, num_rows, width):
    """Stage 4: hosts trade quota so that routes stay on their source rank; loads do not change.

    A step plays one ring of the circle-method tournament, all its pairs side by side. Columns are
    kept in the order of the ring, which one rotation takes to the next ring.

    Args:
      experts, hosts, quota: `[M]` i32, `[M, P]` bool and `[M, P]` i32 by broadcast.
      width: the most broadcasts that one rank can host.

    Returns:
      `[M, P]` i32, the quotas afterwards.
    """
    num_ranks = hosts.shape[1]
    source = counts.T[jnp.maximum(experts, 0)]
    hosted = _running_sum(hosts.astype(jnp.int32), 0)
    number = np.arange(width, dtype=np.int32)[:, None, None]
    held = _sum(hosted <= number, axis=1)
    extra = jnp.concatenate([quota - source, jnp.zeros((1, num_ranks), jnp.int32)])
    extra = jnp.take_along_axis(extra, held, axis=0)

    padding = ((0, 0), (0, num_ranks % 2))
    extra = jnp.roll(jnp.pad(extra, padding), 1, axis=1)
    held = jnp.roll(jnp.pad(held, padding, constant_values=len(hosts)), 1, axis=1)

    def step(_, state):
        extra, held = state
        extra = _play_ring(extra, held)
        return tuple(
            jnp.concatenate([a[:, :1], jnp.roll(a[:, 1:], -1, axis=1)], axis=1)
            for a in (extra, held)
        )

    num_rings = extra.shape[1] - 1
    steps = jnp.where(num_rows > 0, 2 * num_rings, 0)
    extra, _ = lax.fori_loop(0, steps, step, (extra, held))
    extra = jnp.roll(extra, -1, axis=1)[:, :num_ranks]
    after = source + jnp.take_along_axis(extra, jnp.maximum(hosted - 1, 0), axis=0)
    return jnp.where(hosts, after, 0)


def copy_ways(placement, helper, copy_rule, resident, groups: Groups, home):
    """How each broadcast is copied (paper section 4.3), `[M]` i32: the `how` column."""
    expert, group = placement.rows[:, 0], placement.rows[:, 1]
    if copy_rule == "per_slot":
        ways = _mixed_ways(placement, groups, home)
    else:
        way = OWNER_DIRECT if copy_rule == "owner_direct" else SAMI
        ways = jnp.full(expert.shape, way, jnp.int32)
    if resident is None:
        return ways
    is_held = resident.T[helper] == expert[:, None]
    is_member = jnp.asarray(groups.members)[group]
    return jnp.where((is_held | ~is_member).all(axis=1), RESIDENT, ways)


def _mixed_ways(placement, groups: Groups, home):
    """`per_slot`: owner-direct from inside groups that are pure, or the owner's widest."""
    expert, group = placement.rows[:, 0], placement.rows[:, 1]
    owner = expert // home
    is_used = expert >= 0
    is_inside = is_used & jnp.asarray(groups.members)[group, owner]

    num_groups = len(groups.level)
    into = group[:, None] == np.arange(num_groups)
    has_outside = (into & (is_used & ~is_inside)[:, None]).any(axis=0)
    others = (groups.contains | groups.contains.T) & (placement.num_placed > 0)[:, None]
    is_pure = ~has_outside & ~others.any(axis=0)

    # Wider first, then placed earlier, as one number.
    number = np.arange(len(expert), dtype=np.int32)
    order = jnp.asarray(groups.level)[group] * len(expert) + number
    rivals = is_inside & (owner == owner[:, None]) & (order < order[:, None])
    is_direct = is_inside & (is_pure[group] | ~rivals.any(axis=1))
    return jnp.where(is_direct, OWNER_DIRECT, SAMI).astype(jnp.int32)


def _loads(counts):
    """Routes by expert and by home rank, and the water level: `[E]`, `[P]` and `[]` i32."""
    num_ranks = len(counts)
    totals = _sum(counts, axis=0)
    before = _sum(totals.reshape(num_ranks, -1), axis=1)
    total = _sum(before)
    return totals, before, total // num_ranks + (total % num_ranks > 0)


def plan_nothing(counts, num_helper_slots: int) -> CountsPlan:
    """The plan that leaves every route at home, in the shapes of `plan_counts`."""
    _, before, target = _loads(counts)
    rows = len(counts) * num_helper_slots
    return CountsPlan(
        broadcasts=jnp.full((rows, 6), -1, jnp.int32),
        quota=jnp.zeros((rows, len(counts)), jnp.int32),
        num_broadcasts=jnp.int32(0),
        load_before=before,
        load=before,
        target=target,
    )


def plan_counts(
    counts,
    *,
    num_helper_slots: int = 4,
    min_group_size: int = 4,
    min_routes: int = 0,
    gain_threshold: int = 0,
    copy_rule: str = "owner_direct",
    resident=None,
) -> CountsPlan:
    """HALO-Q on the counts `[P, E] i32` of routes by source rank and expert, in JAX.

    The knobs are those of `jax_iser.plan_counts` and static. Sizes and knobs are checked; values
    of `counts` and `resident` are not, since a program has none while it is traced.

    Args:
      counts: `[P, E] i32`, each at least 0, with a sum below 2**31.
      num_helper_slots, min_group_size, min_routes, gain_threshold, copy_rule: see
        `jax_iser.plan_counts`.
      resident: `[P, S] i32` or None, the expert that each helper slot already holds, -1 for none.

    Returns:
      A `CountsPlan` of i32 JAX arrays, equal to the NumPy twin's to the bit.

    Raises:
      ValueError: on sizes or knobs that the planner does not take, with the value and the remedy.
    """

    counts = jnp.asarray(counts)
    if counts.ndim != 2 or not jnp.issubdtype(counts.dtype, jnp.integer):
        raise ValueError(
            f"counts must be an integer array [ranks, experts], got {counts.dtype} of shape "
            f"{counts.shape}"
        )
    counts = counts.astype(jnp.int32)
    num_ranks, num_experts = counts.shape
    knobs = (num_helper_slots, min_group_size, min_routes, gain_threshold, copy_rule)
    check_plan_knobs(num_ranks, num_experts, *knobs)
    if resident is not None and jnp.shape(resident) != (num_ranks, num_helper_slots):
        raise ValueError(
            f"resident has shape {jnp.shape(resident)}, expected (ranks, num_helper_slots) = "
            f"{(num_ranks, num_helper_slots)}"
        )
    totals, before, target = _loads(counts)
    groups = Groups.of(group_levels(num_ranks, min_group_size), num_ranks)
    placement = place(
        totals,
        before,
        target,
        _gains(before, _sum(before), gain_threshold),
        num_helper_slots=num_helper_slots,
        min_routes=min_routes,
        groups=groups,
    )
    return _finish(counts, placement, before, target, groups, num_helper_slots, copy_rule, resident)


def _finish(counts, placement, before, target, groups, num_helper_slots, copy_rule, resident):
    """Stages 3 and 4 and the copy rule: the `CountsPlan` of a placement."""
    num_ranks, home = len(counts), counts.shape[1] // len(counts)
    expert, group = placement.rows[:, 0], placement.rows[:, 1]
    is_used = expert >= 0
    owner = expert // home
    is_member = jnp.asarray(groups.members)[group]
    hosts = is_used[:, None] & (is_member | (owner[:, None] == np.arange(num_ranks)))
    width = num_helper_slots + min(num_helper_slots, home)
    quota = placement.quota
    if width:
        quota = repair(counts, expert, hosts, quota, placement.num_rows, width)
    helper = color_slots(placement, groups)
    ways = copy_ways(placement, helper, copy_rule, resident, groups, home)
    level, index = jnp.asarray(groups.level)[group], jnp.asarray(groups.number)[group]
    columns = jnp.stack([expert, owner, level, index, helper, ways], axis=1)
    padding = ((0, num_ranks * num_helper_slots - len(expert)), (0, 0))
    return CountsPlan(
        broadcasts=jnp.pad(jnp.where(is_used[:, None], columns, -1), padding, constant_values=-1),
        quota=jnp.pad(quota, padding),
        num_broadcasts=placement.num_rows,
        load_before=before,
        load=placement.load,
        target=target,
    )


def check_num_routes(num_routes: int) -> None:
    """Raises ValueError if all ranks together have more routes than the planner takes."""
    if num_routes > MAX_ROUTES:
        raise ValueError(
            f"all ranks together have {num_routes} routes, the planner takes at most {MAX_ROUTES}; "
            "split the tokens into several calls"
        )


def histogram(topk_ids, num_experts: int):
    """Stage 1: routes per expert, `[E] i32`; ids outside `[0, E)` are padding and not counted."""
    return _count(_experts_or_padding(topk_ids, num_experts), num_experts)[:-1]


def _count(ids, num_experts):
    """Routes per expert and of padding, `[E + 1] i32`."""
    return jnp.zeros(num_experts + 1, jnp.int32).at[ids].add(1, mode="promise_in_bounds")


def _experts_or_padding(topk_ids, num_experts):
    """`[N] i32` experts in (token, k) order; E stands for padding."""
    ids = jnp.asarray(topk_ids).reshape(-1)
    return jnp.where((ids >= 0) & (ids < num_experts), ids, num_experts).astype(jnp.int32)


def _number_in_expert(ids, num_experts):
    """How many earlier routes go to the same expert, `[N] i32`."""
    num_routes = ids.size
    number = jnp.arange(num_routes, dtype=jnp.int32)
    if (num_experts + 1) * num_routes <= MAX_KEYS:  # one key per route sorts several times faster
        keys = lax.sort(ids * num_routes + number, is_stable=False)
        expert, route = keys // num_routes, keys % num_routes
    else:
        expert, route = lax.sort((ids, number), num_keys=1, is_stable=True)
    count = _count(ids, num_experts)
    first = _running_sum(count, 0) - count
    empty = jnp.zeros(num_routes, jnp.int32)
    return empty.at[route].set(number - first[expert], mode="promise_in_bounds")


def home_slots(topk_ids, num_experts: int, num_ranks: int, num_helper_slots: int):
    """`route_slot` without a plan: every route at its expert's home, -1 for padding."""
    topk_ids = jnp.asarray(topk_ids)
    home = num_experts // num_ranks
    is_valid = (topk_ids >= 0) & (topk_ids < num_experts)
    slots = topk_ids // home * (home + num_helper_slots) + topk_ids % home
    return jnp.where(is_valid, slots, -1).astype(jnp.int32)


def rewrite(topk_ids, counts, plan, rank, num_helper_slots: int):
    """Stage 5 for source `rank`: `route_slot`, `topk_ids`' shape, i32 physical slots, -1 padding.

    Args:
      topk_ids: integers of any shape, the routes of `rank` in (token, k) order.
      counts: `[P, E] i32` that the plan was made from.
      plan: a `CountsPlan` or `Plan`: its `broadcasts` and `quota` are read.
      rank: `[]` i32, traced or not.
      num_helper_slots: S.

    Returns:
      What the NumPy twin's `rewrite` gives: of a broadcast's expert the rank keeps its first routes
      up to its quota; the surplus of all ranks fills the hosts' spare quota, both in rank order.
    """
    num_ranks, num_experts = counts.shape
    home = num_experts // num_ranks
    slots = home_slots(topk_ids, num_experts, num_ranks, num_helper_slots)
    if num_helper_slots == 0 or slots.size == 0:
        return slots
    expert, owner, helper = plan.broadcasts[:, 0], plan.broadcasts[:, 1], plan.broadcasts[:, 4]
    ids = _experts_or_padding(topk_ids, num_experts)
    number_of_row = jnp.arange(len(expert), dtype=jnp.int32)
    is_used = expert >= 0
    row_of = jnp.full(num_experts + 1, -1, jnp.int32)
    row_of = row_of.at[jnp.where(is_used, expert, num_experts)].set(
        jnp.where(is_used, number_of_row, -1)
    )
    row = row_of[ids]

    source = counts.T[jnp.maximum(expert, 0)]
    kept = jnp.minimum(source, plan.quota)
    ranks = np.arange(num_ranks, dtype=np.int32)
    here = _sum(jnp.where(ranks == rank, kept, 0), axis=1)
    ahead = _sum(jnp.where(ranks < rank, source - kept, 0), axis=1)
    closes = _running_sum(plan.quota - kept, 1)

    place_in_surplus = _number_in_expert(ids, num_experts) - here[row]
    host = _count_at_most(closes, row, ahead[row] + place_in_surplus)
    host = jnp.where(place_in_surplus < 0, rank, host)
    away = host * (home + num_helper_slots) + home + helper[row]
    is_away = (row >= 0) & (host != owner[row])
    return jnp.where(is_away, away, slots.reshape(-1)).reshape(slots.shape)


def _count_at_most(table, row, value):
    """Entries of the sorted `table[row]` that are at most `value`, by bisection; `[N] i32`."""
    width = table.shape[1]
    flat, base = table.reshape(-1), jnp.maximum(row, 0) * width
    found = jnp.zeros_like(row)
    for bit in reversed(range(width.bit_length())):
        tried = found + (1 << bit)
        entry = flat[base + jnp.minimum(tried, width) - 1]
        found = jnp.where((tried <= width) & (entry <= value), tried, found)
    return found
