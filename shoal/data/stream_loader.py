"""Load this rank's rows of the batches of a stream: iterable data, generators, lists of batches.

A stream is read as the user's own DataLoader in one process does, on every rank alike.

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
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from shoal.data.batch_fetcher import identity_collate, rows_of_whole, worker_loader
from shoal.data.batch_shards import BatchShard, row_window, share_batch
from shoal.data.index_batches import check_sampler
from shoal.data.seeds import derive_seed, preserve_rng_state, seed_all
from shoal.data.sharded_loader import ShardedLoader
from shoal.data.tree_map import holds_samples, items_of
from shoal.errors import UsageError
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


class StreamLoader(ShardedLoader):
    """Iterate over this rank's rows of the batches that a stream gives in one process.

    Every rank reads the whole stream. `position` counts batches.

    Args:
        source: a DataLoader of an iterable data set, or an iterable of global batches.
        rank, ranks: this rank and the number of ranks.
        seed: of the run.

    Raises: UsageError: the source keeps one rank's share already.
    """

    def __init__(self, source: Iterable[Any], rank: int, ranks: int, seed: int) -> None:
        super().__init__(rank, ranks, seed)
        self._loader = source if isinstance(source, DataLoader) else None
        self.dataset = source if self._loader is None else self._loader.dataset
        self.batch_size = None if self._loader is None else self._loader.batch_size
        self.num_workers = 0 if self._loader is None else self._loader.num_workers
        _check_unsplit(self.dataset)
        self._states = self._fresh_states()
        self._first = 0  # the reader whose turn it is
        self._read_batches = 0
        self._checksum = 0
        self._is_begun = False

    def batches_in(self, epoch: int) -> int:
        """Return the number of batches of a list. Raises TypeError: only a stream's end tells."""
        if self._loader is not None:
            raise TypeError("iterable data has no length before its end")
        return len(self.dataset)

    def holds_samples(self, length: int) -> bool | None:
        is_default = self._loader is not None and self._loader.collate_fn is default_collate
        return False if is_default else None

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "reader": self._first,
            "readers": [dict(state) for state in self._states],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`: each remaining sample of its epoch comes exactly once.

        A source without `state_dict`, or with samples in a shuffle buffer, is read again from its
        start, and what was seen is skipped.

        Raises: UsageError: another number of workers has read the data.
        """
        self._workers = None
        super().load_state_dict(state)
        states = tuple(dict(reader) for reader in state.get("readers", ()))
        if not self.position:
            self._states, self._first = self._fresh_states(), 0
            return
        if len(states) != len(self._states):
            raise UsageError(
                f"the data was read by {len(states)} readers, one for each worker of the "
                f"DataLoader; now there would be {len(self._states)}, and other samples would come "
                f"next. Use num_workers={len(states)}, or begin a new epoch."
            )
        self._states, self._first = states, int(state["reader"])
        again = sum(
            reader["batches"]
            for reader in states
            if reader["state"] is None and not reader["ended"]
        )
        if again and self.announce is not None:
            name = type(self.dataset).__name__
            self.announce(
                f"note: {again:,} batches of {name} are read again: it has no state_dict that "
                "tells all of its position"
            )

    def _batches(self) -> Iterator[tuple[BatchShard, Any]]:
        if isinstance(self.dataset, Iterator) and self._is_begun:
            raise UsageError(
                "a generator gives its batches once, and this is the second epoch. Use a list, or "
                "an object whose iter() starts again."
            )
        self._is_begun = True
        for batch in self._epoch_batches():
            self._states = tuple(
                batch.state if number == batch.reader else state
                for number, state in enumerate(self._states)
            )
            self._first = (batch.reader + 1) % len(self._states)
            self._compare(batch)
            yield replace(batch.shard, epoch=self.epoch, stop=self.position + 1), batch.batch
        self._check_agreement("the end")

    def _epoch_batches(self) -> Iterator[ReadBatch]:
        loader = self._loader
        readers = StreamReaders(
            self.dataset,
            self.batch_size,
            loader is not None and loader.drop_last,
            identity_collate if loader is None else loader.collate_fn,
            self.rank,
            self.ranks,
            self.seed,
            self.epoch,
            self._states,
        )
        if loader is None or not self.num_workers:
            return readers.read(0)
        if self._workers is None:
            self._workers = workers = worker_loader(readers, None, loader)
            assert workers is not None
            workers.worker_init_fn = partial(readers.start, self._first, workers.worker_init_fn)
        return self._read_workers()

    def _begin_next_epoch(self) -> None:
        super()._begin_next_epoch()
        self._workers = None  # those of the next epoch begin with other states
        self._states, self._first = self._fresh_states(), 0
        self._read_batches = self._checksum = 0

    def _fresh_states(self) -> tuple[ReaderState, ...]:
        return (FRESH,) * max(self.num_workers, 1)

    def _compare(self, batch: ReadBatch) -> None:
        """Compare with the other ranks after 1, 2, 4, 8, ... batches."""
        self._read_batches += 1
        self._checksum = crc32(batch.checksum.to_bytes(4, "big"), self._checksum)
        if self._read_batches & (self._read_batches - 1) == 0:
            self._check_agreement(f"batch {self._read_batches:,}")

    def _check_agreement(self, where: str) -> None:
        """Raise UsageError if the ranks have read other batches. Collective."""
        if self.gather is None or self.ranks == 1:
            return
        found = self.gather(f"{where}, checksum {self._checksum:08x}")
        if len(set(found)) > 1:
            ranks = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(found))
            raise UsageError(
                f"the ranks have not read the same batches from {type(self.dataset).__name__} "
                f"({ranks}). Every rank reads the whole stream and takes its rows of each global "
                "batch, so the order must not depend on the rank, the process or the time: seed "
                "it. If each rank makes samples of its own, prepare without the loader."
            )


def _check_unsplit(source: Any) -> None:
    """Raise UsageError if a source gives this rank's share of the samples already."""
    split = getattr(source, "_distributed", None)
    if split is not None:
        raise UsageError(
            f"{type(source).__name__} already keeps one share of "
            f"{getattr(split, 'world_size', 'several')}; Shoal shares out global batches itself. "
            "Remove split_dataset_by_node."
        )
    check_sampler(getattr(source, "sampler", None), type(source).__name__)
