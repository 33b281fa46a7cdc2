"""Read a stream of samples as the user's own DataLoader in one process does, on every rank alike.

    reader 0 of 2   samples a b | c d | e        num_workers=2, batch_size=2: each worker makes
    reader 1 of 2   samples p q | r              batches of what it reads
    global batches  a b, p q, c d, r, e          readers in turn; one that has ended is skipped

Every rank runs all readers and keeps its own rows of each batch. So the data is read once for each
rank, and nothing is sent. The data set sees one process without ranks, and draws under a seed of
(seed, epoch, reader, batch).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from shoal.data.batch_fetcher import rows_of_whole
from shoal.data.batch_shards import BatchShard, row_window, share_batch
from shoal.data.seeds import derive_seed, preserve_rng_state, seed_all
from shoal.data.tree_map import holds_samples, items_of
from shoal.platform.torch_private.data_workers import set_worker_info, without_default_group

RANK_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("NODE_RANK", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_LOCALID"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    *("PMI_RANK", "PMI_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
)


@contextmanager
def hidden_ranks() -> Iterator[None]:
    """Hide the ranks in the block: no default process group, no launcher's variables.

    WebDataset and data sets of users take their share by these. Shoal shares out global batches
    itself, and each rank would lack what no other has.
    """
    hidden = {name: os.environ.pop(name) for name in RANK_VARIABLES if name in os.environ}
    try:
        with without_default_group():
            yield
    finally:
        os.environ.update(hidden)


ReaderState = dict[str, Any]
"""`batches`: read so far; `state`: what the source's `state_dict` returned after them, or None;
`ended`: True if no more come.
"""
FRESH: ReaderState = {"batches": 0, "state": None, "ended": False}
COMPARED = 256
"""Elements at either end of a tensor that go into its checksum."""


class ReadBatch(NamedTuple):
    """This rank's rows of a batch, with the state of the reader that has read it."""

    batch: Any
    shard: BatchShard
    reader: int
    checksum: int  # of the whole batch
    state: ReaderState


@dataclass(frozen=True, eq=False)
class StreamReaders(IterableDataset):
    """All readers of a stream, in one epoch: a data set for a DataLoader with a worker for each.

    Args:
        source: an iterable of samples, or of batches if `batch_size` is None.
        collate_fn: (list of samples) -> batch, or batch -> batch.
        states: where each reader begins.
    """

    source: Iterable[Any]
    batch_size: int | None
    drop_last: bool
    collate_fn: Callable[[Any], Any]
    rank: int
    ranks: int
    seed: int
    epoch: int
    states: tuple[ReaderState, ...]

    def __iter__(self) -> Iterator[ReadBatch]:
        info = get_worker_info()
        assert info is not None
        return self.read(info.id)

    def start(self, first: int, user_fn: Callable[[int], None] | None, worker: int) -> None:
        """Make a worker process a reader.

        Args:
            first: the reader of worker 0: torch begins with this worker.
            user_fn: the user's own `worker_init_fn`.
        """
        number = (worker + first) % len(self.states)
        seed = derive_seed(self.seed, number)
        set_worker_info(number, len(self.states), seed, self.source)
        if user_fn is not None:
            with hidden_ranks():
                user_fn(number)

    def read(self, number: int) -> Iterator[ReadBatch]:
        """Yield the batches of one reader from its state on."""
        done, state = self.states[number]["batches"], self.states[number]["state"]
        if self.states[number]["ended"]:
            return
        with self._draws(number, done):
            if hasattr(self.source, "set_epoch"):
                self.source.set_epoch(self.epoch)
            iterator = _begin(self.source, state)
        skipped = 0 if state is None else done
        while True:
            with self._draws(number, skipped):
                items = list(islice(iterator, self.batch_size or 1))
                is_short = len(items) < (self.batch_size or 1)
                if not items or (is_short and self.drop_last):
                    return
                skipped += 1
                if skipped <= done:
                    continue
                found = ReadBatch(
                    *self._rows(items),
                    number,
                    0 if self.ranks == 1 else _checksum(items, 0),
                    # A source that has ended may be back at its start.
                    {
                        "batches": skipped,
                        "state": None if is_short else _state_of(self.source, iterator),
                        "ended": is_short,
                    },
                )
            yield found

    @contextmanager
    def _draws(self, number: int, batch: int) -> Iterator[None]:
        """Hide the ranks in the block, which draws under the seed of a reader's batch."""
        with preserve_rng_state(), hidden_ranks():
            seed_all(derive_seed(self.seed, self.epoch, number, batch))
            yield

    def _rows(self, items: list[Any]) -> tuple[Any, BatchShard]:
        """Return this rank's rows, and how many they are of the whole batch."""
        if self.batch_size is None:
            return share_batch(self.collate_fn(items[0]), self.rank, self.ranks)
        whole = self.collate_fn(list(items))
        count = rows_of_whole(whole, len(items))
        if count is not None:
            is_samples = partial(self._holds_samples, items)
            return share_batch(whole, self.rank, self.ranks, count, is_samples)
        # Rows cannot be taken of what was collated, so the samples are.
        window = row_window(len(items), self.rank, self.ranks)
        own = items[window] or items[:1]
        return self.collate_fn(own), BatchShard(0, 0, window.stop - window.start, len(items))

    def _holds_samples(self, items: list[Any], length: int) -> bool | None:
        if self.collate_fn is default_collate:
            return False
        with preserve_rng_state():
            return holds_samples(self.collate_fn(items[:1]), length)


def _begin(source: Any, state: Any) -> Iterator[Any]:
    """Return an iterator of the source that continues from a state."""
    if state is not None and hasattr(source, "load_state_dict"):
        source.load_state_dict(state)
        return iter(source)
    iterator: Any = iter(source)
    if state is not None:
        iterator.load_state_dict(state)
    began: Iterator[Any] = iterator
    return began


def _state_of(source: Any, iterator: Any) -> Any:
    """Return the state of a source, or of its iterator; None if it has none that JSON can hold, or
    none that holds all.
    """
    if _has_shuffle_buffer(source):
        return None
    for owner in (source, iterator):
        if hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict"):
            try:
                return json.loads(json.dumps(owner.state_dict()))
            except (TypeError, ValueError):
                return None
    return None


def _has_shuffle_buffer(source: Any) -> bool:
    """Return True for a stream of Hugging Face that is shuffled in a buffer: the samples in the
    buffer are not in its state, and would be lost.
    """
    stage = getattr(source, "_ex_iterable", None)
    while stage is not None:
        if type(stage).__name__ == "BufferShuffledExamplesIterable":
            return True
        stage = getattr(stage, "ex_iterable", None)
    return False


def _checksum(value: Any, start: int) -> int:
    """Return a checksum of shapes, of the ends of tensors, and of text and numbers."""
    if isinstance(value, Tensor):
        flat = value.detach().cpu().flatten()
        ends = torch.cat([flat[:COMPARED], flat[-COMPARED:]]).contiguous()
        start = crc32(repr(tuple(value.shape)).encode(), start)
        return crc32(ends.view(torch.uint8).numpy().tobytes(), start)
    if isinstance(value, Mapping):
        start = crc32(repr([key for key in value if isinstance(key, (str, int))]).encode(), start)
    items = items_of(value)
    if items is None:
        known = isinstance(value, (str, bytes, int, float))
        return crc32(repr(value).encode(), start) if known else start
    for item in items:
        start = _checksum(item, start)
    return start
