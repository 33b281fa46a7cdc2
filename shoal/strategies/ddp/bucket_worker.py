"""Means of buckets while something else goes on, in the order in which they are started."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from shoal.comm.axis import Axis
from shoal.comm.compression.reducers import BucketEntry
from shoal.strategies.ddp.reduce_functions import ReduceFunction


def with_own_group(axis: Axis) -> Axis:
    """Return the axis with a group of its own on the CPU. Collective over the world.

    What is sent during the backward pass must not come between other messages.
    """
    return replace(axis, group=axis.new_group()) if axis.device.type == "cpu" else axis


class PendingMean(Protocol):
    """A mean that is under way, as torch.distributed.Work."""

    def wait(self) -> Any: ...


class BucketWorker:
    """Starts means in place.

    Three ways, for the reduce function may block and a GPU's launches do not:

          the backend's own all-reduce    asynchronous
          any other, on the CPU           in one thread: every rank must send in the same order
          any other, on a GPU             in the caller's thread

    Args: axis: of a group of its own where messages overlap with others, as `with_own_group` gives.
    """

    def __init__(self, axis: Axis, reduce: ReduceFunction) -> None:
        self.reduce = reduce
        self._num_ranks = axis.size
        self._group: dist.ProcessGroup | None = axis.group
        self._thread: ThreadPoolExecutor | None = None
        if reduce.blocks and axis.device.type == "cpu":
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="bucket-mean")

    def start_mean(self, message: Tensor, members: Sequence[BucketEntry] = ()) -> PendingMean:
        """Start to put the mean over ranks in the place of `message`. Collective.

        Args: members: whose gradients it holds; empty for a message that is no bucket, which is
            averaged exactly.
        """
        if self._thread is not None:
            return _ThreadedMean(self._thread.submit(self.reduce.mean, message, members))
        if self.reduce.blocks:
            self.reduce.mean(message, members)
            return _FinishedMean()
        message.div_(self._num_ranks)
        pending: PendingMean = dist.all_reduce(message, group=self._group, async_op=True)
        return pending

    def close(self) -> None:
        """Wait for what is under way, and let go of the thread and the process group."""
        if self._thread is not None:
            self._thread.shutdown()
        self._group = None


class _ThreadedMean:
    def __init__(self, future: Future[object]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()


class _FinishedMean:
    def wait(self) -> None:
        """Return at once."""
