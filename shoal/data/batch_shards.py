"""Divide each global batch among the ranks.

      order of epoch 3   17 4 90 2 | 55 8 13 71 | 6 29       10 samples, global batches of 4
      rank 0 of 2        17 4      | 55 8       | 6          contiguous and nearly equal; the first
      rank 1 of 2             90 2 |      13 71 |   29       ranks take the remainder

The order is a function of (seed, epoch) alone, so the samples of step t are the same for every
number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchShard:
    """One rank's rows of one global batch."""

    epoch: int
    stop: int  # position in the epoch's order after this global batch: a global sample index
    indices: tuple[int, ...]  # never empty: a rank without rows gets a placeholder sample
    rows: int  # samples that count; 0 for a placeholder
    global_rows: int


def row_window(rows: int, rank: int, ranks: int) -> slice:
    """Return the rows of a global batch that belong to `rank`; empty if there are too few."""
    base, extra = divmod(rows, ranks)
    begin = rank * base + min(rank, extra)
    return slice(begin, begin + base + (rank < extra))


def shard_batch(
    order: Sequence[int],
    epoch: int,
    start: int,
    batch_size: int,
    drop_last: bool,
    rank: int,
    ranks: int,
) -> Iterator[BatchShard]:
    """Yield this rank's shard of every global batch from position `start` on.

    A pure function: every rank can compute the shards of every other rank.
    """
    for first in range(start, len(order), batch_size):
        batch = order[first : first + batch_size]
        if drop_last and len(batch) < batch_size:
            return
        base, extra = divmod(len(batch), ranks)
        begin = rank * base + min(rank, extra)
        rows = base + (rank < extra)
        # Collectives need every rank: a rank without rows computes on a sample of weight zero.
        indices = tuple(batch[begin : begin + rows]) or (batch[0],)
        yield BatchShard(epoch, first + len(batch), indices, rows, len(batch))
