"""Integer splits of routes over ranks, vectorised over plans. All ties go to the lower index."""

from __future__ import annotations

import numpy as np


def water_fill(load: np.ndarray, amount: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """Pours `amount` routes on the coldest allowed ranks, so that the highest of them is lowest.

    Args:
      load: `[N, P]` integers.
      amount: `[N]` integers, at least 0.
      allowed: `[N, P]` bool; a plan with an amount has at least one allowed rank.

    Returns:
      `[N, P] i64`, what each rank takes: up to the common level, and one more on the first
      (coldest, then lowest) ranks for the remainder.
    """
    load, amount = load.astype(np.int64), np.asarray(amount, np.int64)
    far = np.iinfo(np.int64).max // 4
    order = np.argsort(np.where(allowed, load, far), axis=1, kind="stable")
    height = np.take_along_axis(np.where(allowed, load, far), order, axis=1)
    width = np.arange(1, load.shape[1] + 1)
    # Routes it takes to raise the first `width` ranks to the height of the last of them.
    needed = height * width - np.cumsum(np.where(height < far, height, 0), axis=1)
    needed = np.where(height < far, needed, far)
    used = np.maximum((needed <= amount[:, None]).sum(axis=1), 1)
    below = np.cumsum(np.where(height < far, height, 0), axis=1)
    rows = np.arange(len(load))
    pool = amount + below[rows, used - 1]
    level, rest = pool // used, pool % used
    inside = width <= used[:, None]
    taken = np.where(inside, level[:, None] + (width <= rest[:, None]) - height, 0)
    taken[amount == 0] = 0
    result = np.zeros_like(taken)
    np.put_along_axis(result, order, taken, axis=1)
    return result


def fill_to(load: np.ndarray, amount: np.ndarray, allowed: np.ndarray, level) -> np.ndarray:
    """Moves up to `amount` routes to the coldest allowed ranks first, each up to `level`.

    Args:
      load: `[N, P]` integers.
      amount, level: `[N]` integers.
      allowed: `[N, P]` bool.

    Returns:
      `[N, P] i64`, what each rank takes; less than `amount` in all where the room ends.
    """
    load = load.astype(np.int64)
    room = np.where(allowed, np.maximum(0, np.asarray(level)[:, None] - load), 0)
    far = np.iinfo(np.int64).max
    order = np.argsort(np.where(allowed, load, far), axis=1, kind="stable")
    sorted_room = np.take_along_axis(room, order, axis=1)
    before = np.cumsum(sorted_room, axis=1) - sorted_room
    taken = np.clip(np.asarray(amount)[:, None] - before, 0, sorted_room)
    result = np.zeros_like(taken)
    np.put_along_axis(result, order, taken, axis=1)
    return result


def even_split(total: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Splits each total over ranks in proportion to small integer weights, remainder to the first.

    Args:
      total: `[M]` integers.
      weight: `[M, P]` integers, at least one above 0 in each row.

    Returns:
      `[M, P] i64` with row sums `total`.
    """
    total, weight = np.asarray(total, np.int64), np.asarray(weight, np.int64)
    ends = np.cumsum(weight, axis=1)
    # The remainder goes to the lower ranks: cut from the far end.
    cuts = total[:, None] - (total[:, None] * (ends[:, -1:] - ends) // ends[:, -1:])
    return np.diff(cuts, axis=1, prepend=0)
