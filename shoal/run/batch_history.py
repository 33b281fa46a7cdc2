"""The batches that steps were computed on, by their places in the loaders' epochs.

Shares of one global batch lie at the same place on all ranks. A rank that leaves out a batch, by a
number of its own, computes on the share of another one from then on, and no collective tells.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

from shoal.data.batch_shards import BatchShard


class BatchPlaces(NamedTuple):
    """Places of the batches of a rank so far; equal on all ranks that compute the same batches.

    Attributes:
        unknown: batches without a place: no prepared loader has made any of their tensors.
        checksum: of all places.
        epoch, stop: place of the last one: the position in its epoch after it.
    """

    unknown: int = 0
    checksum: int = 0
    epoch: int = 0
    stop: int = 0


class BatchHistory:
    """Collects the places of batches.

    Attributes: places: so far.
    """

    def __init__(self) -> None:
        self.places = BatchPlaces()

    def add(self, shard: BatchShard | None) -> None:
        """Add the batch of a step; None if its place is not known."""
        unknown, checksum, *_ = self.places
        if shard is None:
            self.places = self.places._replace(unknown=unknown + 1)
        else:
            checksum = zlib.crc32(b"%d %d" % (shard.epoch, shard.stop), checksum)
            self.places = BatchPlaces(unknown, checksum, shard.epoch, shard.stop)


def difference(first: BatchPlaces, rank: int, other: BatchPlaces) -> str:
    """Return how the batches of rank 0 differ from those of another rank; empty if they do not, or
    if that cannot be told.
    """
    if first.unknown or other.unknown or first.checksum == other.checksum:
        return ""
    if first[2:] == other[2:]:
        return f"ranks 0 and {rank} have computed steps on different batches"
    return (
        f"rank 0 computes a step on the batch that ends at {first.stop} of epoch {first.epoch}, "
        f"and rank {rank} on the one that ends at {other.stop} of epoch {other.epoch}"
    )
