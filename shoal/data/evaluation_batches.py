"""Whole batches for evaluation, which ranks take in turn.

batch     0   1   2   3   4   5   6
rank      0   1   2   0   1   2   0       of 3 ranks; 1 and 2 may join the last one uncounted
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset

from shoal.data.batch_fetcher import BatchFetcher, worker_loader
from shoal.data.index_batches import IndexBatch, IndexBatches
from shoal.data.loader import is_source
from shoal.data.stream_loader import StreamLoader
from shoal.errors import UsageError


class EvaluationBatch(NamedTuple):
    """One batch of this rank."""

    rows: int
    batch: Any
    is_counted: bool
    """False for a batch that another rank counts, computed for its collectives alone."""


class EvaluationBatches:
    """Iterate over the whole batches that this rank computes.

    A DataLoader of map-style data is read in the data set's own order, in batches of `batch_size`,
    whatever its sampler. With a `batch_sampler`, ready-made or iterable batches, the batches are
    those that the loader gives in one process; a rank reads all of a stream.

    Args:
        loader: a DataLoader, or an iterable of batches.
        joins: give every rank a batch, not to be counted, for each batch of the others.

    Attributes:
        total: number of batches of all ranks; known at the end.

    Raises: UsageError: the loader gives no batches.
    """

    def __init__(self, loader: Any, rank: int, ranks: int, joins: bool = False) -> None:
        if not is_source(loader):
            raise UsageError(
                "evaluation needs a DataLoader or an iterable of batches, which ranks take in "
                f"turn; {type(loader).__name__} is neither."
            )
        self._loader, self._rank, self._ranks, self._joins = loader, rank, ranks, joins
        self.total = 0

    def __iter__(self) -> Iterator[EvaluationBatch]:
        loader = self._loader
        fetches = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        yield from self._fetched(loader) if fetches else self._streamed(loader)
        if not self.total:
            raise UsageError("there is nothing to evaluate: the data set is empty.")

    def _fetched(self, loader: DataLoader) -> Iterator[EvaluationBatch]:
        """Yield this rank's batches of map-style data; the others are not fetched."""
        batches = _index_batches(loader)
        self.total = len(batches)
        own = batches[self._rank :: self._ranks]
        ready = IndexBatches(loader, 0).are_ready
        fetch = BatchFetcher(loader, 0, 0, 1, ready)
        to_fetch = [*own, *(batches[:1] if self._joins_last else [])]
        workers = worker_loader(fetch, to_fetch, loader)
        found = map(fetch.__getitem__, to_fetch) if workers is None else workers
        for index, (batch, shard) in enumerate(found):
            yield EvaluationBatch(shard.rows, batch, index < len(own))

    def _streamed(self, loader: Any) -> Iterator[EvaluationBatch]:
        """Yield this rank's batches of a stream, of which every rank reads all."""
        first = None
        stream = StreamLoader(loader, rank=0, ranks=1, seed=0)
        for number, batch in enumerate(stream):
            assert stream.share is not None
            item = EvaluationBatch(stream.share.rows, batch, True)
            first = item if number == 0 else first
            self.total = number + 1
            if number % self._ranks == self._rank:
                yield item
        if self._joins_last and first is not None:
            yield first._replace(is_counted=False)

    @property
    def _joins_last(self) -> bool:
        """Return True if this rank joins the last batch of others, uncounted."""
        return self._joins and self._rank >= self.total % self._ranks > 0


def _index_batches(loader: DataLoader) -> list[IndexBatch]:
    if loader.batch_size is None:
        return list(IndexBatches(loader, 0).remaining(0, 0))
    samples, size = len(loader.dataset), loader.batch_size  # type: ignore[arg-type]
    stops = (min(start + size, samples) for start in range(0, samples, size))
    return [
        IndexBatch(0, stop, tuple(range(number * size, stop))) for number, stop in enumerate(stops)
    ]
