"""The user's DataLoader, seen from one rank: the same data set, this rank's share of every global
batch.

`DataLoader(batch_size=256)` keeps its meaning: 256 samples make one optimizer step, whatever the
number of ranks. The order of an epoch comes from the user's own sampler, drawn under a seed of
(seed, epoch); every sample is fetched under a seed of (seed, epoch, index), so neither ranks nor
worker processes change what anybody sees."""

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
    """Iterates over this rank's shares, one epoch for each `iter()`; knows and restores its
    position.

    Args:
        loader: a map-style DataLoader whose `batch_size` is the global batch.
        rank, ranks: whose share.
        seed: of the run.
        recorder: is told how long batches take to come, where a trace is asked for.

    Attributes:
        share: the share that was yielded last.
        epoch: of the batches that come next; counted from 0.
        position: samples of this epoch that were yielded, over all ranks: a global sample index.
        yielded: which batch came with which share.
    """

    def __init__(
        self, loader: DataLoader, rank: int, ranks: int, seed: int, recorder: Recorder | None = None
    ) -> None:
        _refuse_what_cannot_be_shared(loader)
        assert loader.batch_size is not None
        self.dataset, self.batch_size, self.drop_last = (
            loader.dataset,
            loader.batch_size,
            loader.drop_last,
        )
        self.rank, self.ranks, self.seed, self.sampler = rank, ranks, seed, loader.sampler
        self.epoch, self.position, self._recorder = 0, 0, recorder
        self.share: BatchShard | None = None
        self.yielded = BatchRegistry()
        self._fetch = _BatchFetcher(loader.dataset, loader.collate_fn, seed)
        # One for all epochs, so that persistent workers persist.
        self._fetched = _worker_loader(self._fetch, _ResumedSampler(self), loader)
        self._orders: dict[int, list[int]] = {}

    def __len__(self) -> int:
        """Global batches in this epoch."""
        return self.batches_in(self.epoch)

    def batches_in(self, epoch: int) -> int:
        """Global batches in an epoch; epochs differ where the sampler has a `set_epoch` that
        makes them.
        """
        samples = self._samples(epoch)
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)

    def first(self, samples: int) -> Any:
        """The first samples of the data set, collated; the loader stays where it is."""
        indices = tuple(range(min(samples, len(self.dataset))))  # type: ignore[arg-type]
        return self._fetch[BatchShard(0, len(indices), indices, len(indices), len(indices))]

    def state_dict(self) -> dict[str, int]:
        """Where the data stands, in numbers that hold for any number of ranks."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where `state` was taken: each remaining sample of its epoch comes exactly once."""
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        if self.position >= self._end():
            self.epoch, self.position = self.epoch + 1, 0

    def __iter__(self) -> Iterator[Any]:
        coming = list(self._remaining())
        try:
            batches = (
                map(self._fetch.__getitem__, coming) if self._fetched is None else self._fetched
            )
            timed = batches if self._recorder is None else _timed(batches, self._recorder)
            for self.share, batch in zip(coming, timed, strict=True):
                self.position = self.share.stop
                self.yielded.remember(batch, self.share)
                yield batch
        finally:
            # A loop that is left early has ended its epoch too, as with any DataLoader.
            self.epoch, self.position = self.epoch + 1, 0

    def close(self) -> None:
        """End the worker processes.

        They must not be left to the garbage collector: in a cycle, it finishes their queues before
        torch tells them by these to end, and then each is waited for 5 s."""
        self._fetched = None

    def _remaining(self) -> Iterator[BatchShard]:
        order = self._order(self.epoch)
        return shard_batch(
            order, self.epoch, self.position, self.batch_size, self.drop_last, self.rank, self.ranks
        )

    def _end(self) -> int:
        """Position at which this epoch is over."""
        return len(self) * self.batch_size if self.drop_last else self._samples(self.epoch)

    def _samples(self, epoch: int) -> int:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
        return len(self.sampler)  # type: ignore[arg-type]

    def _order(self, epoch: int) -> list[int]:
        """The sampler's indices for an epoch: a function of (seed, epoch). Only the newest
        epoch's are kept.
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
    """The same batches."""
    coming, end = iter(batches), object()
    while True:
        with recorder.during(DATA, "data"):
            batch = next(coming, end)
        if batch is end:
            return
        yield batch


class _ResumedSampler(Sampler):
    """The shares still to come of the loader's present epoch."""

    def __init__(self, loader: DistributedBatchLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[BatchShard]:
        return self.loader._remaining()


class _BatchFetcher(Dataset):
    """A share's samples, collated; each made under its own seed."""

    def __init__(self, dataset: Dataset, collate_fn: Any, seed: int) -> None:
        self.dataset, self.collate_fn, self.seed = dataset, collate_fn, seed
        plain = collate_fn is default_collate
        self.tensors = dataset.tensors if plain and type(dataset) is TensorDataset else None
        self.batch = dataset.batch if plain and isinstance(dataset, Batched) else None

    def __getitem__(self, share: BatchShard) -> Any:
        # Nothing random and nothing to collate: one indexing operation gives the same tensors, many
        # times faster.
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


def fetched(loader: DataLoader, coming: list[BatchShard]) -> Iterable[Any]:
    """The collated batch of each share, made in `loader`'s workers where it has some."""
    fetch = _BatchFetcher(loader.dataset, loader.collate_fn, seed=0)
    workers = _worker_loader(fetch, coming, loader)
    return map(fetch.__getitem__, coming) if workers is None else workers


def _worker_loader(
    fetch: _BatchFetcher, coming: Iterable[BatchShard], loader: DataLoader
) -> DataLoader | None:
    """A DataLoader with the user's worker settings that fetches whole shares; none where it
    would add nothing.
    """
    pin_memory = loader.pin_memory and torch.cuda.is_available()
    if loader.num_workers == 0 and not pin_memory:
        return None
    arguments: dict[str, Any] = {"num_workers": loader.num_workers, "pin_memory": pin_memory}
    # Each new iterator draws a seed; drawn from the default generator, it would change the dropout
    # masks that follow.
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
        fetch, batch_size=None, sampler=coming, collate_fn=_identity_collate, **arguments
    )


def _identity_collate(batch: Any) -> Any:
    """A share arrives collated."""
    return batch


def _refuse_what_cannot_be_shared(loader: DataLoader) -> None:
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
