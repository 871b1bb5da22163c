"""Aligned groups: the fixed rank sets that a replica can be broadcast to (paper section 4.2)."""

from __future__ import annotations

from typing import NamedTuple


class GroupLevel(NamedTuple):
    """All groups of one level: `num_groups` sets of `group_size` consecutive ranks."""

    level: int
    group_size: int
    num_groups: int

    def members(self, group: int) -> range:
        """Ranks of group `group`."""
        return range(group * self.group_size, (group + 1) * self.group_size)


def group_levels(num_ranks: int, min_group_size: int = 4) -> tuple[GroupLevel, ...]:
    """Levels from coarse (all ranks) to fine.

    Level `l` splits the ranks into `2**l` groups. Level 0 always exists; a finer one exists while
    `2**l` divides `num_ranks` and its groups hold at least `min_group_size` ranks.

    Args:
      num_ranks: ranks `P` of the EP group, at least 1.
      min_group_size: smallest group of a finer level: 4 (the paper's floor), 2 or 1.

    Raises:
      ValueError: on a `num_ranks` below 1 or another `min_group_size`.

    Example:
      >>> [level.group_size for level in group_levels(24)]
      [24, 12, 6]
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks={num_ranks} is below 1; an EP group has at least one rank")
    if min_group_size not in (1, 2, 4):
        raise ValueError(f"min_group_size={min_group_size} is not one of 1, 2, 4; use 4, 2 or 1")
    levels = [GroupLevel(0, num_ranks, 1)]
    while num_ranks % (2 << levels[-1].level) == 0:
        level = levels[-1].level + 1
        if num_ranks >> level < min_group_size:
            break
        levels.append(GroupLevel(level, num_ranks >> level, 1 << level))
    return tuple(levels)
