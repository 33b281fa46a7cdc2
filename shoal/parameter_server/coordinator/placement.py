"""Which shard answers for each part, and which parts are on their way to another one.

    owner a        moving a -> b              owner b
    a answers      a has stopped and gives    b answers; a forgets
                   b takes and replicates
                   workers keep what they would say

A move that is called off, and one that is made again, must not be taken for each other: each has
the version in which it began, and what is given says to which it belongs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Move(NamedTuple):
    """Of one part."""

    target: int  # the shard
    start_version: int  # the version of the placement in which it began


@dataclass(frozen=True)
class Placement:
    """One moment's; a later one has a higher version.

    Attributes:
        owners: the shard of each part.
        moving: part -> move.
        leaving: shards that end when they own nothing any more.
    """

    version: int
    owners: tuple[int, ...]
    moving: Mapping[int, Move] = field(default_factory=dict)
    leaving: tuple[int, ...] = ()

    def owned_by(self, shard: int) -> set[int]:
        """Parts for which it answers, or has until their move began."""
        return {part for part, owner in enumerate(self.owners) if owner == shard}

    def arriving_at(self, shard: int) -> dict[int, int]:
        """Parts on their way to it, and since when."""
        return {
            part: move.start_version for part, move in self.moving.items() if move.target == shard
        }

    def route(self, part: int) -> int | None:
        """The shard that answers for a part; None while it is moving."""
        return None if part in self.moving else self.owners[part]

    def to_json(self) -> dict[str, Any]:
        moving = [[part, *move] for part, move in self.moving.items()]
        return {
            "version": self.version,
            "owners": self.owners,
            "moving": moving,
            "leaving": self.leaving,
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Placement:
        moving = {part: Move(target, since) for part, target, since in found["moving"]}
        return cls(found["version"], tuple(found["owners"]), moving, tuple(found["leaving"]))
