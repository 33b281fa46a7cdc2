"""The indices of every global batch of a map-style DataLoader, drawn lazily under a seed.

    sampler, batch_size=4     17 4 90 2 | 55 8 13 71 | 6 29      cut into batches
    batch_sampler             17 4 90 | 2 55 8 13 71 | 6 29      its own lists, of any sizes
    sampler, batch_size=None  17 | 4 | 90                        each index is a ready-made batch

A sampler may have 1e10 indices: only a window of them is drawn at a time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import islice
from typing import Any, NamedTuple
from zlib import crc32

from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from shoal.data.seeds import derive_seed, seeded
from shoal.errors import UsageError

DRAWN_AHEAD = 4096
"""Items of a sampler that are drawn at once."""


class IndexBatch(NamedTuple):
    """The indices of one global batch."""

    epoch: int
    stop: int
    """Position in the epoch after this batch: samples; batches if they are ready-made."""
    indices: tuple[Hashable, ...]


class IndexBatches:
    """Draw the indices of the global batches of an epoch: a function of (seed, epoch).

    Args:
        loader: map-style.

    Attributes:
        are_ready: True if each index gives a batch that comes ready-made.

    Raises: UsageError: the sampler gives each rank other samples.
    """

    def __init__(self, loader: DataLoader, seed: int) -> None:
        self._seed = seed
        self._batch_size = loader.batch_size
        self._drop_last = loader.drop_last
        self._has_lists = loader.batch_size is None and loader.batch_sampler is not None
        self._source: Any = loader.batch_sampler if self._has_lists else loader.sampler
        self.are_ready = loader.batch_size is None and not self._has_lists
        for source in self._samplers():
            check_sampler(source, "the loader")

    def count(self, epoch: int) -> int:
        """Return the number of global batches of an epoch. Raises TypeError if nobody knows."""
        self._set_epoch(epoch)  # which may change the length
        length = len(self._source)
        if self._batch_size is None:
            return length
        return length // self._batch_size if self._drop_last else -(-length // self._batch_size)

    def remaining(self, epoch: int, position: int) -> Iterator[IndexBatch]:
        """Yield the batches of an epoch from a position on."""
        items = self._items(epoch)
        if self._has_lists:
            stop = 0
            for item in items:
                indices = tuple(map(plain_index, item))
                stop += len(indices)
                if stop > position and indices:
                    yield IndexBatch(epoch, stop, indices)
            return
        size = self._batch_size or 1
        items = islice(items, position, None)
        stop = position
        while indices := tuple(map(plain_index, islice(items, size))):
            if self._drop_last and len(indices) < size:
                return
            stop += len(indices)
            yield IndexBatch(epoch, stop, indices)

    def indices(self, epoch: int) -> list[Hashable]:
        """Return what the sampler gives in an epoch, the last smaller batch included."""
        return [*map(plain_index, self._items(epoch))]

    def _items(self, epoch: int) -> Iterator[Any]:
        return seeded(lambda: self._begin(epoch), derive_seed(self._seed, epoch), DRAWN_AHEAD)

    def _begin(self, epoch: int) -> Iterator[Any]:
        for source in self._samplers():
            generator = getattr(source, "generator", None)
            if generator is not None:
                generator.manual_seed(derive_seed(self._seed, epoch))
        self._set_epoch(epoch)
        return iter(self._source)

    def _set_epoch(self, epoch: int) -> None:
        for source in self._samplers():
            if hasattr(source, "set_epoch"):
                source.set_epoch(epoch)

    def _samplers(self) -> Iterator[Any]:
        """Yield the source of indices, and the sampler that a batch sampler is made of."""
        yield self._source
        if hasattr(self._source, "sampler"):
            yield self._source.sampler


def check_sampler(sampler: Any, owner: str) -> None:
    """Raise UsageError for a sampler that gives each rank other samples."""
    if isinstance(sampler, DistributedSampler):
        raise UsageError(
            f"{owner} has a DistributedSampler, which gives every rank other samples; Shoal shares "
            "out global batches itself. Use shuffle=True, or the sampler that the script has on "
            "one device."
        )


def plain_index(index: Any) -> Hashable:
    """Return an index as an int if it is one, such as a tensor of one; lists become tuples."""
    try:
        return int(index)
    except (TypeError, ValueError):
        return tuple(index) if isinstance(index, list) else index


def index_seed(seed: int, epoch: int, index: Hashable) -> int:
    """Return the seed of the sample of an index: of its text, if it is no int."""
    number = index if isinstance(index, int) else crc32(repr(index).encode())
    return derive_seed(seed, epoch, number)
