"""The interface of every loader that yields this rank's rows of global batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch.utils.data import DataLoader

from shoal.data.batch_shards import BatchRegistry, BatchShard
from shoal.data.fingerprint import Fingerprint
from shoal.data.tree_map import to_device
from shoal.platform.torch_private.data_workers import end_workers
from shoal.trace.recorder import DATA, Recorder
from shoal.watchdog.progress_writer import own_progress

OWN_ROWS_NOTE = (
    "a loop over a prepared loader took no step. Each rank has had its own rows, so a number "
    "that the loop computes, such as an accuracy, is of these alone, and of a stand-in where a "
    "batch has fewer samples than there are ranks. run.evaluate(compute_sums, loader), with the "
    "DataLoader itself in place of the prepared one, counts each sample once. Or leave that loader "
    "out of run.prepare: every rank then reads all samples. Or sum over ranks what the first "
    "loader.share.rows rows of each batch give: a stand-in has 0."
)
OTHER_BATCHES_NOTE = (
    "a step was taken with a batch that no prepared loader has yielded, after a loop over one has "
    "ended. Each rank computes all rows of such a batch, and an order that torch draws after "
    "run.prepare is another one on each data rank, where one device has one. Give the new loader "
    "to run.prepare too, loader = run.prepare(loader), or each batch to run.share."
)


class YieldWatch:
    """Is told when a loop has a batch of a loader, and when it asks for the next one.

    This one does nothing.
    """

    def begin(self, batch: Any, shard: BatchShard) -> None:
        """Note that the loop is given `batch`."""

    def end(self) -> None:
        """Note that the loop fetches another batch, or ends."""


class ShardedLoader(ABC):
    """Iterate over this rank's rows, one epoch for each `iter()`; save and restore the position.

    Args:
        rank, ranks: this rank and the number of ranks.
        seed: of the run.

    Attributes:
        batch_size: samples of a global batch; None if batches may differ in size.
        epoch: of the next batches; counted from 0.
        position: samples of this epoch yielded so far, over all ranks; batches, where they come
            ready-made.
        yielded: finds the shard of a batch.
        data_fingerprint: of `dataset`, as it was when the loader was made.
        watch: is told of each batch.
        has_stepped: a step was taken since the last loop began.
        has_ended: the last loop has read all batches.
        pending: batches of the last loop with which no step was taken, as far as is known.
        recorder: records the waiting time for each batch; None without a trace.
        announce: prints a note; None for nobody.
        gather: text -> the texts of all ranks; collective. With it, iterating over a stream is
            collective at the batches 1, 2, 4, 8, ... and at the end of an epoch, where ranks
            compare what they read.
        device: to which the tensors of each batch are moved; None to leave them where they are.
    """

    batch_size: int | None = None
    dataset: Any = None

    def __init__(self, rank: int, ranks: int, seed: int) -> None:
        self.rank = rank
        self.ranks = ranks
        self.seed = seed
        self.epoch = 0
        self.position = 0
        self.yielded = BatchRegistry()
        self.data_fingerprint: Fingerprint = {}
        self.watch = YieldWatch()
        self.has_stepped = False
        self.has_ended = False
        self.pending = 0
        self.recorder: Recorder | None = None
        self.announce: Callable[[str], None] | None = None
        self.gather: Callable[[str], list[str]] | None = None
        self.device: torch.device | None = None
        self._noted: set[str] = set()
        self._open: list[object] = []
        """Loops that have begun and not ended; none of those before `load_state_dict`."""
        self._last_epoch = -1
        self._workers: DataLoader | None = None
        """Its worker processes fetch the batches; None where this process does."""
        self._reading: WeakSet[Any] = WeakSet()
        """Iterators of `_workers` that something holds."""

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the script's loader, such as `batch_sampler`."""
        loader = None if name.startswith("_") else self.__dict__.get("_loader")
        if loader is None:
            raise AttributeError(f"a prepared loader has no attribute '{name}'")
        return getattr(loader, name)

    def __len__(self) -> int:
        """Return the number of global batches in this epoch. Raises TypeError: nobody knows it."""
        return self.batches_in(self.epoch)

    @property
    def source(self) -> Any:
        """Return what the script has prepared: a DataLoader, or another source of batches."""
        loader = self.__dict__.get("_loader")
        return self.dataset if loader is None else loader

    @property
    def share(self) -> BatchShard | None:
        """Return the shard that was yielded last; None before the first."""
        return self.yielded.last

    def __iter__(self) -> Iterator[Any]:
        watch = self.watch
        watch.end()  # of another loader's batch, in a loop over both
        if not self._open:
            self._last_epoch = -1
        elif self.position:  # another loop stands within an epoch, or has left its iterator there
            self._begin_next_epoch()
        self.has_stepped, self.has_ended, self.pending = False, False, 0
        has_yielded = False
        loop = object()
        self._open.append(loop)
        try:
            for share, batch in self._timed(self._batches()):
                batch = batch if self.device is None else to_device(batch, self.device)
                has_yielded = True
                self.pending += 1
                self.position = share.stop
                self.yielded.remember(batch, share)
                watch.begin(batch, share)
                yield batch
                watch.end()
                if loop in self._open:  # another loop may have read meanwhile
                    self.epoch, self.position = share.epoch, share.stop
            self.has_ended = True
            # Such as an evaluation; one without a batch goes on behind the last of an epoch.
            if has_yielded and self.ranks > 1 and not self.has_stepped:
                self._note_once("own rows", OWN_ROWS_NOTE)
        finally:
            # A loop that stops early ends its epoch, too, as with any DataLoader.
            if loop in self._open:
                self._open.remove(loop)
                self._begin_next_epoch()

    @property
    def is_over(self) -> bool:
        """Return True if a step cannot be of a batch of the last loop.

        False too where the loop has fetched ahead, or keeps the batches that it has read.
        """
        return self.has_ended and not self.pending and not self.yielded.is_kept

    def note_other_batch(self) -> None:
        """Say that a step's batch is of a loader that is not prepared."""
        self._note_once("other batches", OTHER_BATCHES_NOTE)

    def _note_once(self, subject: str, text: str) -> None:
        """Print a note, if none was printed on this subject."""
        if self.announce is not None and subject not in self._noted:
            self.announce(f"note: {text}")
            self._noted.add(subject)

    def _begin_next_epoch(self) -> None:
        """Begin the next epoch that no loop has begun."""
        self._last_epoch = max(self._last_epoch, self.epoch)
        self.epoch, self.position = self._last_epoch + 1, 0

    @abstractmethod
    def _batches(self) -> Iterable[tuple[BatchShard, Any]]:
        """Return the remaining batches of this epoch."""

    @abstractmethod
    def batches_in(self, epoch: int) -> int:
        """Return the number of global batches in an epoch, as `__len__` does."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data as JSON values; it is valid for any number of ranks."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`: each remaining sample of its epoch comes exactly once.

        Behind its last batch the next loop is empty, so that what a script does at the end of an
        epoch is done.
        """
        self._open.clear()
        self.epoch, self.position = int(state["epoch"]), int(state["position"])

    def holds_samples(self, length: int) -> bool | None:
        """Return True if unclear lists of this length hold samples, False if columns.

        None if nothing tells.
        """
        return None

    def close(self) -> None:
        """End the worker processes.

        The garbage collector must not do it: in a reference cycle it closes the queues before torch
        has sent the workers their end through them. Nor must multiprocessing, by the SIGTERM that
        they outlive. Torch then waits 5 s for each worker, and Python `GRACE_S`."""
        for iterator in list(self._reading):
            end_workers(iterator)
        self._workers = None

    def _read_workers(self) -> Iterator[Any]:
        """Return an iterator of `self._workers`, which `close` ends."""
        assert self._workers is not None
        iterator = iter(self._workers)
        self._reading.add(iterator)
        return iterator

    def _timed(self, batches: Iterable[tuple[BatchShard, Any]]) -> Iterator[tuple[BatchShard, Any]]:
        """Yield the same batches and record the waiting time for each."""
        recorder, progress = self.recorder, own_progress()
        iterator = iter(batches)
        while True:
            with (
                progress.data(),
                nullcontext() if recorder is None else recorder.during(DATA, "data"),
            ):
                item = next(iterator, None)
            if item is None:
                return
            yield item
