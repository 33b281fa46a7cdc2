"""Disks of hosts that share none, and the disks on which each rank's file of a checkpoint lies.

disk      0        1        2              copies=1: a file also lies on the next disk
ranks     0, 1     2, 3     4
holds     0, 1, 4  2, 3,    4, 2, 3        any one disk may be lost
                   0, 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class HostDisks:
    """The run directories of the ranks, where hosts share none.

    Args:
        of_rank: number of the disk of each rank; disks are numbered by their first ranks.
        copies: disks besides its own that get a copy of each rank's file, as far as there are any.
    """

    of_rank: tuple[int, ...]
    copies: int = 1

    @property
    def count(self) -> int:
        """The number of disks."""
        return max(self.of_rank) + 1

    def ranks(self, disk: int) -> list[int]:
        """Return the ranks whose run directory is on `disk`, in order."""
        return [rank for rank, own in enumerate(self.of_rank) if own == disk]

    def first_rank(self, disk: int) -> int:
        """Return the rank that acts for `disk`."""
        return self.of_rank.index(disk)

    def is_first(self, rank: int) -> bool:
        """Return True if `rank` acts for its disk."""
        return self.first_rank(self.of_rank[rank]) == rank

    def holders(self, rank: int) -> list[int]:
        """Return the disks on which the file of `rank` lies, its own first.

        With n disks these are `copies + 1` of them, and at most n. The copies of one disk's files
        are on the disks after it, in a ring.
        """
        own = self.of_rank[rank]
        return [(own + distance) % self.count for distance in range(self._files)]

    def receiver(self, disk: int, index: int) -> int:
        """Return the rank of `disk` that receives the file number `index`: they take turns."""
        ranks = self.ranks(disk)
        return ranks[index % len(ranks)]

    @property
    def _files(self) -> int:
        return min(self.copies + 1, self.count)


def numbered(keys: Sequence[int]) -> tuple[int, ...]:
    """Return the number of each rank's disk. Ranks with the same key share one.

    Args:
        keys: by rank.
    """
    order = list(dict.fromkeys(keys))
    return tuple(order.index(key) for key in keys)
