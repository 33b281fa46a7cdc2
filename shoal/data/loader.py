"""Load this rank's rows of every global batch, with the data set and options of a DataLoader.

`DataLoader(batch_size=256)` keeps its meaning: 256 samples make one optimizer step on any number of
ranks. The user's own sampler gives the order of an epoch, under a seed of (seed, epoch). Every
sample is fetched under a seed of (seed, epoch, index). So the samples depend neither on the number
of ranks nor on the number of worker processes.

    DataLoader(map-style data)       DistributedBatchLoader    fetches by index
    DataLoader(iterable data)        ┐
    a list of batches, a generator   ├ StreamLoader            reads all, keeps its own rows
    another library's loader         ┘
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    default_collate,
)

from shoal.data.batch_fetcher import BatchFetcher, Collate, needs_whole_batch, worker_loader
from shoal.data.batch_shards import BatchShard
from shoal.data.index_batches import IndexBatch, IndexBatches
from shoal.data.sharded_loader import ShardedLoader
from shoal.data.stream_loader import StreamLoader
from shoal.data.tree_map import tensors_in
from shoal.errors import UsageError
from shoal.trace.recorder import Recorder

WHOLE_BATCH_NOTE = (
    "collate_fn makes other rows of a part of a batch than of the whole, as one that pads to the "
    "longest sample does, or leaves samples out. So each rank fetches and collates every global "
    "batch, whose rows are those of one device, if the loop does not cut them to its own longest "
    "sample, x[:max(lengths)]. A collate_fn that pads to a fixed length needs only the rank's own "
    "samples."
)
MOST_PEEKED = 16
"""Batches among which one of several samples is looked for, with which collation is tried."""


class DistributedBatchLoader(ShardedLoader):
    """Iterate over this rank's rows of the batches of a map-style DataLoader.

    Args:
        loader: its batches are the global ones: of `batch_size`, of a `batch_sampler`, or
            ready-made items of the data set.
        rank, ranks: this rank and the number of ranks.
        seed: of the run.

    Raises: UsageError: the sampler gives each rank other samples.
    """

    def __init__(self, loader: DataLoader, rank: int, ranks: int, seed: int) -> None:
        super().__init__(rank, ranks, seed)
        self.dataset = loader.dataset
        self.batch_size = loader.batch_size
        self._loader = loader
        self._indices = IndexBatches(loader, seed)
        self._fetch = BatchFetcher(loader, seed, rank, ranks, self._indices.are_ready)
        self._pending = _PendingBatches()
        # One loader for all epochs, so that persistent workers persist.
        self._workers = worker_loader(self._fetch, self._pending, loader)
        self._is_probed = ranks == 1
        self._last_shapes: list[tuple[int, ...]] | None = None

    def batches_in(self, epoch: int) -> int:
        """Return the number of global batches in an epoch. A sampler with `set_epoch` may change
        it from epoch to epoch.
        """
        return self._indices.count(epoch)

    def holds_samples(self, length: int) -> bool | None:
        if self.share is None:
            return None
        batch = IndexBatch(self.share.epoch, self.share.stop, self.share.indices)
        return self._fetch.holds_samples(batch, length)

    def _batches(self) -> Iterator[tuple[BatchShard, Any]]:
        pending = self._probe(self._indices.remaining(self.epoch, self.position))
        self._pending.batches = pending
        in_process = self._workers is None
        fetched = map(self._fetch.__getitem__, pending) if in_process else self._read_workers()
        for rows, shard in fetched:
            self._watch_shapes(rows)
            yield shard, rows

    def _probe(self, remaining: Iterator[IndexBatch]) -> Iterator[IndexBatch]:
        """Decide, before the first batch, if collation needs whole batches."""
        begun = [] if self._is_probed else [*islice(remaining, 1)]
        while begun and len(begun) < MOST_PEEKED and len(begun[-1].indices) < 2:
            following = next(remaining, None)  # of one sample nothing can be told
            if following is None:
                break
            begun.append(following)
        if not begun:
            return remaining
        self._is_probed = True
        self._fetch.whole_batch = needs_whole_batch(self._fetch, begun[-1], self._loader)
        if self._fetch.whole_batch and not isinstance(self._fetch.collate_fn, Collate):
            self._note_once("whole batches", WHOLE_BATCH_NOTE)
        return chain(begun, remaining)

    def _watch_shapes(self, rows: Any) -> None:
        """Note once that tensors of a share change their length, though a probe has not seen it."""
        collate = self._fetch.collate_fn
        if self.ranks == 1 or self._fetch.whole_batch or self._fetch.ready:
            return
        if collate is default_collate or isinstance(collate, Collate):
            return
        shapes = [tuple(tensor.shape[1:]) for tensor in tensors_in(rows)]
        last, self._last_shapes = self._last_shapes, shapes
        if last is not None and len(last) == len(shapes) and last != shapes:
            before, now = next(
                pair for pair in zip(last, shapes, strict=True) if len(set(pair)) > 1
            )
            self._note_once(
                "shapes",
                f"collate_fn has made rows of shape {before} and {now}. If it pads to the longest "
                "of its samples, each rank pads its own, and a loss or model that does not ignore "
                "padding gives other numbers than one device. For the same numbers: pad to a fixed "
                "length, or collate_fn=shoal.Collate(collate_fn, whole_batch=True).",
            )


class _PendingBatches(Sampler):
    """The batches that are to be fetched next, in an epoch that has begun."""

    batches: Iterator[IndexBatch] = iter(())

    def __iter__(self) -> Iterator[IndexBatch]:
        return self.batches


def shard_batches(
    batches: Any,
    rank: int,
    ranks: int,
    seed: int,
    recorder: Recorder | None = None,
    announce: Callable[[str], None] | None = None,
    gather: Callable[[str], list[str]] | None = None,
) -> ShardedLoader:
    """Return a loader of this rank's rows of the global batches.

    Args:
        batches: a DataLoader, or any iterable of global batches.
        rank, ranks: this rank and the number of ranks.
        seed: of the run.
        recorder: records the waiting time for each batch; None without a trace.
        announce: prints a note.
        gather: text -> the texts of all ranks; collective. With it, streams of data are compared
            between the ranks.

    Raises: UsageError: no batches can be had of it, or each rank would get other samples.
    """
    if not is_source(batches):
        raise UsageError(
            f"{type(batches).__name__} gives no batches. Use a DataLoader, or any iterable of "
            "global batches, such as a list or a generator."
        )
    is_indexed = isinstance(batches, DataLoader) and not isinstance(
        batches.dataset, IterableDataset
    )
    kind = DistributedBatchLoader if is_indexed else StreamLoader
    loader: ShardedLoader = kind(batches, rank, ranks, seed)
    loader.recorder, loader.announce, loader.gather = recorder, announce, gather
    return loader


def is_source(value: Any) -> bool:
    """Return True for what `shard_batches` takes: a DataLoader or another iterable of batches."""
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, dict))


class EvaluationBatch(NamedTuple):
    """One batch of this rank."""

    rows: int
    batch: Any
    is_counted: bool
    """False for a batch that another rank counts, computed for its collectives alone."""


class EvaluationBatches:
    """Iterate over the whole batches that this rank computes, for evaluation.

    batch     0   1   2   3   4   5   6
    rank      0   1   2   0   1   2   0       of 3 ranks; 1 and 2 may join the last one uncounted

    Of a DataLoader of map-style data, the samples that its sampler gives are read, in the order of
    the data set and in batches of `batch_size`. With a `batch_sampler`, ready-made or iterable
    batches, the batches are those that the loader gives in one process; a rank reads all of a
    stream.

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
        size = loader.batch_size
        if size is None:
            batches = list(IndexBatches(loader, 0).remaining(0, 0))
        else:
            rows = _rows_read(loader)
            cuts = [(start, min(start + size, len(rows))) for start in range(0, len(rows), size)]
            batches = [IndexBatch(0, stop, tuple(rows[start:stop])) for start, stop in cuts]
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


def _rows_read(loader: DataLoader) -> Sequence[Hashable]:
    """Return the indices of the samples that a loader reads, in the order of the data set."""
    sampler: Any = loader.sampler
    samples = len(loader.dataset)  # type: ignore[arg-type]
    is_whole = type(sampler) in (SequentialSampler, RandomSampler) and len(sampler) == samples
    if is_whole and not getattr(sampler, "replacement", False):
        return range(samples)
    indices: list[Any] = IndexBatches(loader, 0).indices(0)
    return sorted(indices) if all(isinstance(index, int) for index in indices) else indices
