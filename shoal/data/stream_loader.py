"""Load this rank's rows of the batches of a stream: iterable data, generators, lists of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch.utils.data import DataLoader, default_collate

from shoal.data.batch_fetcher import identity_collate, worker_settings
from shoal.data.batch_shards import BatchShard
from shoal.data.index_batches import check_sampler
from shoal.data.sharded_loader import ShardedLoader
from shoal.data.stream_reader import FRESH, ReadBatch, ReaderState, StreamReaders
from shoal.errors import UsageError
from shoal.trace.recorder import Recorder


class StreamLoader(ShardedLoader):
    """Iterate over this rank's rows of the batches that a stream gives in one process.

    Every rank reads the whole stream: see `stream_reader`. `position` counts batches.

    Args:
        source: a DataLoader of an iterable data set, or an iterable of global batches.
        rank, ranks: this rank and the number of ranks.
        seed: of the run.
        recorder: records the waiting time for each batch; None without a trace.
        announce: prints a note.
        gather: text -> the texts of all ranks; collective. With it, iterating is collective at the
            batches 1, 2, 4, 8, ... and at the end of an epoch, where ranks compare what they read.

    Raises: UsageError: the source keeps one rank's share already.
    """

    def __init__(
        self,
        source: Iterable[Any],
        rank: int,
        ranks: int,
        seed: int,
        recorder: Recorder | None = None,
        announce: Callable[[str], None] | None = None,
        gather: Callable[[str], list[str]] | None = None,
    ) -> None:
        super().__init__(rank, ranks, seed, recorder)
        self._loader = source if isinstance(source, DataLoader) else None
        self.dataset = source if self._loader is None else self._loader.dataset
        self.batch_size = None if self._loader is None else self._loader.batch_size
        self.num_workers = 0 if self._loader is None else self._loader.num_workers
        _check_unsplit(self.dataset)
        self._announce = announce
        self._gather = gather
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
        if again and self._announce is not None:
            name = type(self.dataset).__name__
            self._announce(
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
            settings = worker_settings(loader)
            start = partial(readers.start, self._first, settings["worker_init_fn"])
            self._workers = DataLoader(
                readers,
                batch_size=None,
                collate_fn=identity_collate,
                num_workers=self.num_workers,
                pin_memory=loader.pin_memory and torch.cuda.is_available(),
                **{**settings, "worker_init_fn": start},
            )
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
        if self._gather is None or self.ranks == 1:
            return
        found = self._gather(f"{where}, checksum {self._checksum:08x}")
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
