"""Asynchronous means of buckets, in the order in which they are started.

backward pass   ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓
start_mean         1     2   3
reduce             ├─ 1 ─┤├─ 2 ─┤├─ 3 ─┤      one after the other, the same order on all ranks
wait                              1  2  3
"""

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
    """Return the axis with a process group of its own on the CPU. Collective over the world.

    Messages of the backward pass then do not mix with other messages of the axis.
    """
    return replace(axis, group=axis.new_group()) if axis.device.type == "cpu" else axis


class PendingMean(Protocol):
    """Handle of a mean that is not finished, like torch.distributed.Work."""

    def wait(self) -> Any: ...


class BucketWorker:
    """Starts means over ranks that replace the message.

          reduce function         device    runs
          backend's all-reduce    any       asynchronously
          any other               CPU       in one thread, so that all ranks send in the same order
          any other               GPU       in the caller's thread; kernel launches do not block

    Args: axis: an axis of `with_own_group` if messages overlap with others.
    """

    def __init__(self, axis: Axis, reduce: ReduceFunction) -> None:
        self.reduce = reduce
        self._num_ranks = axis.size
        self._group: dist.ProcessGroup | None = axis.group
        self._thread: ThreadPoolExecutor | None = None
        if reduce.blocks and axis.device.type == "cpu":
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="bucket-mean")

    def start_mean(self, message: Tensor, members: Sequence[BucketEntry] = ()) -> PendingMean:
        """Start to replace `message` by its mean over ranks. Collective.

        Args: members: parameters whose gradients the message holds. Empty for a message of other
            values, which is averaged without compression.
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
        """Wait for started means, and release the thread and the process group."""
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
