"""Load this rank's shard of every global batch, with the data set and options of a DataLoader.

`DataLoader(batch_size=256)` keeps its meaning: 256 samples make one optimizer step on any number of
ranks. The user's own sampler gives the order of an epoch, under a seed of (seed, epoch). Every
sample is fetched under a seed of (seed, epoch, index). So the samples depend neither on the number
of ranks nor on the number of worker processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    TensorDataset,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from shoal.data.batch_registry import BatchRegistry
from shoal.data.batch_shards import BatchShard, shard_batch
from shoal.data.seeds import derive_seed, preserve_rng_state, seed_all
from shoal.data.source import Batched
from shoal.errors import UsageError
from shoal.trace.recorder import Recorder
from shoal.trace.span import DATA


class DistributedBatchLoader:
    """Iterate over this rank's shards, one epoch for each `iter()`; save and restore the position.

    Args:
        loader: a map-style DataLoader whose `batch_size` is the global batch.
        rank, ranks: this rank and the number of ranks.
        seed: of the run.
        recorder: records the waiting time for each batch; None without a trace.

    Attributes:
        share: the shard that was yielded last.
        epoch: of the next batches; counted from 0.
        position: samples of this epoch yielded so far, over all ranks: a global sample index.
        yielded: finds the shard of a batch.
    """

    def __init__(
        self, loader: DataLoader, rank: int, ranks: int, seed: int, recorder: Recorder | None = None
    ) -> None:
        _check_loader(loader)
        assert loader.batch_size is not None
        self.dataset = loader.dataset
        self.batch_size = loader.batch_size
        self.drop_last = loader.drop_last
        self.sampler = loader.sampler
        self.rank = rank
        self.ranks = ranks
        self.seed = seed
        self.epoch = 0
        self.position = 0
        self._recorder = recorder
        self.share: BatchShard | None = None
        self.yielded = BatchRegistry()
        self._fetch = _BatchFetcher(loader.dataset, loader.collate_fn, seed)
        # One loader for all epochs, so that persistent workers persist.
        self._fetched = _worker_loader(self._fetch, _ResumedSampler(self), loader)
        self._orders: dict[int, list[int]] = {}

    def __len__(self) -> int:
        """Return the number of global batches in this epoch."""
        return self.batches_in(self.epoch)

    def batches_in(self, epoch: int) -> int:
        """Return the number of global batches in an epoch. A sampler with `set_epoch` may change
        it from epoch to epoch.
        """
        samples = self._samples(epoch)
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)

    def first(self, samples: int) -> Any:
        """Return the first samples of the data set, collated, without moving the position."""
        indices = tuple(range(min(samples, len(self.dataset))))  # type: ignore[arg-type]
        return self._fetch[BatchShard(0, len(indices), indices, len(indices), len(indices))]

    def state_dict(self) -> dict[str, int]:
        """Return the position in the data; it is valid for any number of ranks."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from `state`: each remaining sample of its epoch comes exactly once."""
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        if self.position >= self._end():
            self.epoch, self.position = self.epoch + 1, 0

    def __iter__(self) -> Iterator[Any]:
        shards = list(self._remaining())
        try:
            batches = (
                map(self._fetch.__getitem__, shards) if self._fetched is None else self._fetched
            )
            timed = batches if self._recorder is None else _timed(batches, self._recorder)
            for self.share, batch in zip(shards, timed, strict=True):
                self.position = self.share.stop
                self.yielded.remember(batch, self.share)
                yield batch
        finally:
            # A loop that stops early ends its epoch, too, as with any DataLoader.
            self.epoch, self.position = self.epoch + 1, 0

    def close(self) -> None:
        """End the worker processes.

        The garbage collector must not do it: in a reference cycle it closes the queues before torch
        has sent the workers their end through them. Torch then waits 5 s for each worker."""
        self._fetched = None

    def _remaining(self) -> Iterator[BatchShard]:
        order = self._order(self.epoch)
        return shard_batch(
            order, self.epoch, self.position, self.batch_size, self.drop_last, self.rank, self.ranks
        )

    def _end(self) -> int:
        """Return the position at which this epoch ends."""
        return len(self) * self.batch_size if self.drop_last else self._samples(self.epoch)

    def _samples(self, epoch: int) -> int:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
        return len(self.sampler)  # type: ignore[arg-type]

    def _order(self, epoch: int) -> list[int]:
        """Return the sampler's indices for an epoch: a function of (seed, epoch). Only the newest
        epoch is cached.
        """
        if epoch not in self._orders:
            with preserve_rng_state():
                seed_all(derive_seed(self.seed, epoch))
                generator = getattr(self.sampler, "generator", None)
                if generator is not None:
                    generator.manual_seed(derive_seed(self.seed, epoch))
                if hasattr(self.sampler, "set_epoch"):
                    self.sampler.set_epoch(epoch)
                self._orders = {epoch: [int(index) for index in self.sampler]}
        return self._orders[epoch]


def _timed(batches: Iterable[Any], recorder: Recorder) -> Iterator[Any]:
    """Yield the same batches and record the waiting time for each."""
    iterator = iter(batches)
    end = object()
    while True:
        with recorder.during(DATA, "data"):
            batch = next(iterator, end)
        if batch is end:
            return
        yield batch


class _ResumedSampler(Sampler):
    """The remaining shards of the loader's current epoch."""

    def __init__(self, loader: DistributedBatchLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[BatchShard]:
        return self.loader._remaining()


class _BatchFetcher(Dataset):
    """A data set indexed by shards: fetch the samples, each under its own seed, and collate
    them.
    """

    def __init__(self, dataset: Dataset, collate_fn: Any, seed: int) -> None:
        self.dataset, self.collate_fn, self.seed = dataset, collate_fn, seed
        plain = collate_fn is default_collate
        self.tensors = dataset.tensors if plain and type(dataset) is TensorDataset else None
        self.batch = dataset.batch if plain and isinstance(dataset, Batched) else None

    def __getitem__(self, share: BatchShard) -> Any:
        # Nothing is random here and nothing needs collation: one indexing operation gives the same
        # tensors many times faster.
        if self.tensors is not None:
            rows = torch.tensor(share.indices)
            return [tensor[rows] for tensor in self.tensors]
        if self.batch is not None:
            return self.batch(list(share.indices))
        with preserve_rng_state():
            samples = []
            for index in share.indices:
                seed_all(derive_seed(self.seed, share.epoch, index))
                samples.append(self.dataset[index])
        return self.collate_fn(samples)


def fetched(loader: DataLoader, shards: list[BatchShard]) -> Iterable[Any]:
    """Return the collated batch of each shard, made in `loader`'s workers where it has some."""
    fetch = _BatchFetcher(loader.dataset, loader.collate_fn, seed=0)
    workers = _worker_loader(fetch, shards, loader)
    return map(fetch.__getitem__, shards) if workers is None else workers


def _worker_loader(
    fetch: _BatchFetcher, shards: Iterable[BatchShard], loader: DataLoader
) -> DataLoader | None:
    """Return a DataLoader with the user's worker settings that fetches one shard at a time.

    None without workers and pinned memory: then the fetcher is called directly.
    """
    pin_memory = loader.pin_memory and torch.cuda.is_available()
    if loader.num_workers == 0 and not pin_memory:
        return None
    arguments: dict[str, Any] = {"num_workers": loader.num_workers, "pin_memory": pin_memory}
    # Each new iterator draws a seed. From the default generator, the draw would change all dropout
    # masks after it.
    arguments["generator"] = torch.Generator()
    if loader.num_workers:
        for name in (
            "timeout",
            "worker_init_fn",
            "multiprocessing_context",
            "prefetch_factor",
            "persistent_workers",
        ):
            arguments[name] = getattr(loader, name)
    return DataLoader(
        fetch, batch_size=None, sampler=shards, collate_fn=_identity_collate, **arguments
    )


def _identity_collate(batch: Any) -> Any:
    """Return the batch: the fetcher has collated it."""
    return batch


def _check_loader(loader: DataLoader) -> None:
    if isinstance(loader.dataset, IterableDataset):
        raise UsageError(
            f"{type(loader.dataset).__name__} is an IterableDataset: nobody can tell which of its "
            "samples belong to "
            "which rank. Give it a length and __getitem__ (a map-style Dataset)."
        )
    if isinstance(loader.sampler, DistributedSampler):
        raise UsageError(
            "the loader has a DistributedSampler, which gives every rank other samples; Shoal "
            "shares out global "
            "batches itself. Use shuffle=True, or the sampler that the script has on one device."
        )
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise UsageError(
            "the loader makes its batches with a batch_sampler of its own; Shoal shares out global "
            "batches itself. "
            "Use DataLoader(dataset, batch_size=..., sampler=...)."
        )
