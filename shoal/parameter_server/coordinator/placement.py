"""Placement: the shard that owns each partition, and the partitions that migrate to another shard.

    shard a is owner       migrating a -> b             shard b is owner
    a answers              a has stopped, and sends     b answers; a frees its memory
                           b loads and replicates
                           workers hold their requests

A cancelled migration must not be confused with a later one of the same partition. Each migration
carries the placement version in which it started, and so does every transfer message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Move(NamedTuple):
    """Migration of one partition."""

    target: int  # the shard
    start_version: int  # the placement version in which the migration started


@dataclass(frozen=True)
class Placement:
    """One version of the placement; a later one has a higher number.

    Attributes:
        version: from 1.
        owners: the shard of each partition.
        moving: partition -> migration.
        leaving: shards that end as soon as they own nothing.
    """

    version: int
    owners: tuple[int, ...]
    moving: Mapping[int, Move] = field(default_factory=dict)
    leaving: tuple[int, ...] = ()

    def owned_by(self, shard: int) -> set[int]:
        """Return the partitions of a shard, with those that migrate away from it."""
        return {partition for partition, owner in enumerate(self.owners) if owner == shard}

    def arriving_at(self, shard: int) -> dict[int, int]:
        """Return the partitions that migrate to a shard -> the version in which each started."""
        return {
            partition: move.start_version
            for partition, move in self.moving.items()
            if move.target == shard
        }

    def route(self, partition: int) -> int | None:
        """Return the shard that answers for a partition; None while it migrates."""
        return None if partition in self.moving else self.owners[partition]

    def to_json(self) -> dict[str, Any]:
        moving = [[partition, *move] for partition, move in self.moving.items()]
        return {
            "version": self.version,
            "owners": self.owners,
            "moving": moving,
            "leaving": self.leaving,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Placement:
        """Read the result of `to_json`, after a way through JSON."""
        moving = {
            partition: Move(target, start_version)
            for partition, target, start_version in fields["moving"]
        }
        return cls(fields["version"], tuple(fields["owners"]), moving, tuple(fields["leaving"]))
