"""Fetch the samples of this rank's rows, each under its own seed, and collate them.

A collate function may look at all samples of its batch: it pads them to the longest, masks tokens
at random, or packs texts into rows. Then rows of a share differ from those of the global batch, and
the fetcher collates the whole global batch on every rank and takes this rank's rows of it. A trial
tells, with the first samples of the data, which are the same on all ranks:

    collate(13 samples)                      ┐  equal: each rank collates its own samples
    collate(4), collate(4), collate(5)       ┘  not equal: it pads, draws or packs
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from shoal.data.batch_shards import BatchShard, row_window, share_batch
from shoal.data.index_batches import IndexBatch, index_seed
from shoal.data.own_generators import OwnGenerators
from shoal.data.seeds import derive_seed
from shoal.data.source import Batched
from shoal.data.tree_map import (
    holds_samples,
    is_per_sample,
    items_of,
    nothing_known,
    rows_of,
    take_rows,
    tensors_in,
)
from shoal.errors import UsageError

LocalRows = tuple[Any, BatchShard]
"""(this rank's rows, and which they are of the global batch)"""
WORKER_SETTINGS = ("timeout", "multiprocessing_context", "prefetch_factor", "persistent_workers")
GRACE_S = 30
"""Seconds after a SIGTERM in which a worker goes on: Slurm's KillWait."""
# Odd, so that the length of a sequence is rarely taken for it.
SAMPLES = 13
PARTS = (slice(0, 4), slice(4, 8), slice(8, SAMPLES))
LEFT_OUT = (
    "collate_fn has made fewer rows than it was given samples, as one that leaves out bad samples "
    "does, and it made a row of each of the first ones. Ranks would weight their means by samples "
    "that are not there. Let it see whole batches: collate_fn=shoal.Collate(collate_fn, "
    "whole_batch=True)."
)


@dataclass(frozen=True)
class Collate:
    """A collate function of which it is known what it has to see.

    Args:
        function: (list of samples) -> batch.
        whole_batch: True to collate the global batch on every rank and take this rank's rows;
            False to collate this rank's samples alone.
    """

    function: Callable[[list[Any]], Any]
    whole_batch: bool

    def __call__(self, samples: list[Any]) -> Any:
        return self.function(samples)


class BatchFetcher(Dataset):
    """A data set indexed by global batches, whose items are this rank's rows of them.

    Args:
        ready: each index gives a batch that comes ready-made.
        whole_batch: collate the whole global batch, then take rows.
    """

    def __init__(
        self, loader: DataLoader, seed: int, rank: int, ranks: int, ready: bool = False
    ) -> None:
        dataset: Any = loader.dataset
        self.dataset = dataset
        self.collate_fn: Any = loader.collate_fn
        self.seed, self.rank, self.ranks, self.ready = seed, rank, ranks, ready
        self.whole_batch = False
        is_plain = self.collate_fn is default_collate
        self._tensors = dataset.tensors if is_plain and type(dataset) is TensorDataset else None
        self._batch = dataset.batch if is_plain and isinstance(dataset, Batched) else None

    @cached_property
    def _generators(self) -> OwnGenerators:
        # Looked for where samples are fetched: a worker has variables of modules of its own.
        return OwnGenerators(self.dataset, self.collate_fn)

    def __getitem__(self, batch: IndexBatch) -> LocalRows:
        if self.ready or self.whole_batch:
            return self._rows_of_whole(batch)
        count = own = len(batch.indices)
        indices = batch.indices
        if self.ranks > 1:
            window = row_window(count, self.rank, self.ranks)
            own = window.stop - window.start
            # Collectives need every rank: one without rows computes on a stand-in of weight zero.
            indices = indices[window] or indices[:1]
        found = self.collated(batch, indices)
        if self.collate_fn is default_collate:
            return found, BatchShard(batch.epoch, batch.stop, own, count, batch.indices)
        if self.ranks == 1:
            count = own = rows_of_whole(found, count) or count
        elif not isinstance(self.collate_fn, Collate) and _leaves_out(found, len(indices)):
            raise UsageError(LEFT_OUT)
        return found, BatchShard(batch.epoch, batch.stop, own, count, batch.indices)

    def collated(self, batch: IndexBatch, indices: Sequence[Any]) -> Any:
        """Return the samples of some indices of `batch`, collated."""
        # Nothing is random here and nothing needs collation: one indexing operation gives the same
        # tensors many times faster.
        if self._tensors is not None:
            rows = torch.tensor(indices)
            return [tensor[rows] for tensor in self._tensors]
        if self._batch is not None:
            return self._batch(list(indices))
        with self._generators.preserved():
            samples = []
            for index in indices:
                self._generators.seed(index_seed(self.seed, batch.epoch, index))
                samples.append(self.dataset[index])
            self._generators.seed(derive_seed(self.seed, batch.epoch, batch.stop, -1))
            return self.collate_fn(samples)

    def _rows_of_whole(self, batch: IndexBatch) -> LocalRows:
        """Return this rank's rows of a batch that comes ready-made, or is collated as a whole."""
        rows = None
        if self.ready:
            index = batch.indices[0]
            with self._generators.preserved():
                self._generators.seed(index_seed(self.seed, batch.epoch, index))
                found = self.dataset[list(index) if isinstance(index, tuple) else index]
                whole = self.collate_fn(found)
        else:
            whole = self.collated(batch, batch.indices)
            rows = rows_of_whole(whole, len(batch.indices))
            if rows is None:
                raise UsageError(
                    f"collate_fn has made tensors of a batch of {len(batch.indices)} samples that "
                    "do not agree on a number of rows. Put the rows along dimension 0 of every "
                    "tensor."
                )
        is_samples = nothing_known if self.ready else partial(self.holds_samples, batch)
        local, shard = share_batch(whole, self.rank, self.ranks, rows, is_samples)
        return local, replace(shard, epoch=batch.epoch, stop=batch.stop, indices=batch.indices)

    def holds_samples(self, batch: IndexBatch, length: int) -> bool | None:
        """Return True if unclear lists of this length hold samples, False if columns."""
        if self.collate_fn is default_collate or self._batch is not None:
            return False
        return (
            None if self.ready else holds_samples(self.collated(batch, batch.indices[:1]), length)
        )


def rows_of_whole(batch: Any, num_samples: int) -> int | None:
    """Return the rows along dimension 0 of a batch that was made of so many samples.

    A collate function that packs several samples into a row makes fewer rows. None if the tensors
    have no common number of rows, or have their samples along dimension 1.
    """
    try:
        take_rows(batch, slice(0, 1), num_samples)
        return num_samples
    except UsageError:
        pass
    if any(tensor.dim() > 1 and tensor.shape[1] == num_samples for tensor in tensors_in(batch)):
        return None
    try:
        return rows_of(batch)
    except UsageError:
        return None


def _leaves_out(batch: Any, num_samples: int) -> bool:
    """Return True if a batch has fewer rows than the samples that it was made of."""
    return (rows_of_whole(batch, num_samples) or num_samples) < num_samples


def worker_loader(
    fetch: Dataset,
    batches: Iterable[Any] | None,
    loader: DataLoader,
    num_workers: int | None = None,
) -> DataLoader | None:
    """Return a DataLoader with the user's worker settings that fetches one batch at a time.

    None without workers and pinned memory: then the fetcher is called directly.

    Args:
        batches: what is fetched; None if `fetch` is iterable.
        num_workers: instead of the user's number of workers, if that is not 0.
    """
    pin_memory = loader.pin_memory and torch.cuda.is_available()
    if loader.num_workers == 0 and not pin_memory:
        return None
    workers = loader.num_workers if num_workers is None else min(num_workers, loader.num_workers)
    return DataLoader(
        fetch,
        batch_size=None,
        sampler=batches,
        collate_fn=identity_collate,
        num_workers=workers,
        pin_memory=pin_memory,
        # Each new iterator draws a seed. From the default generator, the draw would change all
        # dropout masks after it.
        generator=torch.Generator(),
        worker_init_fn=partial(outlive_sigterm, loader.worker_init_fn),
        **({name: getattr(loader, name) for name in WORKER_SETTINGS} if workers else {}),
    )


def identity_collate(batch: Any) -> Any:
    """Return the batch: it is collated already."""
    return batch


def outlive_sigterm(user_fn: Callable[[int], None] | None, worker: int) -> None:
    """Begin a worker that a SIGTERM ends later, and by status 0.

    Slurm, for one, sends SIGTERM to every process of a step. Workers that it ended would end their
    rank in torch's error, in the middle of a save.

    Args: user_fn: the user's own `worker_init_fn`, which may change that.
    """
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(GRACE_S))
    signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
    if user_fn is not None:
        user_fn(worker)


def needs_whole_batch(fetch: BatchFetcher, batch: IndexBatch, loader: DataLoader) -> bool:
    """Return True if the collate function of `fetch` must see whole global batches.

    It runs in a worker process if the loader has some: a data set may open files when it is first
    read, and must not do so before the workers are forked.
    """
    if isinstance(fetch.collate_fn, Collate):
        return fetch.collate_fn.whole_batch
    if fetch.ready or fetch.collate_fn is default_collate or len(batch.indices) < 2:
        return False
    probe = _CollateProbe(fetch)
    workers = worker_loader(probe, [batch], loader, num_workers=1)
    return bool(probe[batch] if workers is None else next(iter(list(workers))))


class _CollateProbe(Dataset):
    def __init__(self, fetch: BatchFetcher) -> None:
        self.fetch = fetch

    def __getitem__(self, batch: IndexBatch) -> bool:
        indices = batch.indices[:SAMPLES]
        # Fetched twice: a collate function may take its samples apart.
        whole = self.fetch.collated(batch, indices)
        windows = [part for part in PARTS if indices[part]]
        if len(windows) == 1:
            windows = [slice(0, 1), slice(1, None)]
        parts = [self.fetch.collated(batch, indices[window]) for window in windows]
        counts = [len(indices[window]) for window in windows]
        if _same_rows(whole, parts, counts) and not _leaves_out(whole, len(indices)):
            return False
        return rows_of_whole(whole, len(indices)) is not None


def _same_rows(whole: Any, parts: Sequence[Any], counts: Sequence[int]) -> bool:
    """Return True if the parts one after the other are the whole batch."""
    if isinstance(whole, Tensor):
        return not whole.dim() or any(
            _is_concatenation(whole, parts, dim) for dim in range(min(whole.dim(), 2))
        )
    if is_per_sample(whole, sum(counts)):
        joined = [entry for part in parts for entry in items_of(part) or ()]
        return len(joined) == len(whole) and all(map(_equal, whole, joined))
    items = items_of(whole)
    if items is None:
        return True
    columns = [items_of(part) or [] for part in parts]
    if any(len(column) != len(items) for column in columns):
        return False
    return all(map(_same_rows, items, zip(*columns, strict=True), [counts] * len(items)))


def _is_concatenation(whole: Tensor, parts: Sequence[Tensor], dim: int) -> bool:
    try:
        joined = torch.cat(list(parts), dim)
    except (RuntimeError, IndexError, TypeError):  # of other sizes, or a part has None
        return False
    return _equal(whole, joined)


def _equal(left: Any, right: Any) -> bool:
    """Return True for nests of equal tensors; NaN equals NaN. Other values are not compared."""
    pairs = zip(tensors_in(left), tensors_in(right), strict=False)
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
        if a.is_floating_point() or a.is_complex()
        else torch.equal(a, b)
        for a, b in pairs
    )
