"""A bucket: parameters of one dtype whose gradients are sent in one message.

`BucketWorker` starts their means in the backward pass, and they end in the same order:

backward pass   ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓
start_mean         1     2   3
reduce             ├─ 1 ─┤├─ 2 ─┤├─ 3 ─┤      one after the other, the same order on all ranks
wait                              1  2  3
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.comm.assembly import as_shard
from shoal.comm.axis import Axis
from shoal.comm.buckets import bucketize
from shoal.comm.compression.base import BucketEntry
from shoal.comm.norm import to_local
from shoal.platform.tensors import MIB
from shoal.strategies.base import no_op
from shoal.strategies.ddp.reduce_functions import ReduceFunction


class GradientBucket:
    """Copies gradients to a message, and their means back.

    Args:
        parameters: parameters of one dtype. A DTensor counts with its shard on this rank.
        members: their names and shapes on this rank.

    Attributes: num_missing: parameters that have no gradient yet in this backward pass.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], members: Sequence[BucketEntry]) -> None:
        self.parameters = parameters
        self.members = members
        self.num_missing = len(parameters)
        self._message: Tensor | None = None
        self._wait: Wait | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.parameters[0].dtype

    @property
    def num_elements(self) -> int:
        """Elements of the message."""
        return sum(member.count for member in self.members)

    def start_mean(self, worker: BucketWorker) -> None:
        """Copy gradients to the message, zeros for missing ones, and start its mean. Collective."""
        self._message = self._packed()
        self._wait = worker.start_mean(self._message, self.members)

    def finish_mean(self, used: Sequence[bool]) -> None:
        """Wait for the mean, and copy it to the gradients.

        Args: used: for each parameter, True if any rank had a gradient. A parameter that no rank
            has used gets `.grad = None`.
        """
        assert self._wait is not None
        assert self._message is not None
        self._wait()
        means = self._message.split([member.count for member in self.members])
        for parameter, mean, by_any_rank in zip(self.parameters, means, used, strict=True):
            if not by_any_rank:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = _as_gradient(parameter, mean.view_as(to_local(parameter)).clone())
            else:
                to_local(parameter.grad).copy_(mean.view_as(to_local(parameter)))
        self._message = None
        self._wait = None

    def clear(self) -> None:
        """Drop the message of a step that an error has ended."""
        if self._wait is not None:
            self._wait()
        self._message = None
        self._wait = None

    def _packed(self) -> Tensor:
        return torch.cat([_dense_or_zeros(parameter) for parameter in self.parameters])


def bucketize_backward(
    parameters: Mapping[str, nn.Parameter],
    bucket_mb: float,
) -> list[GradientBucket]:
    """Return buckets in the reverse order of parameters, in which most gradients arrive.

    Args: bucket_mb: size of a bucket in MiB. A larger parameter has a bucket of its own.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    backward_order = reversed([*parameters.values()])
    return [
        GradientBucket(group, [BucketEntry(names[id(p)], to_local(p).shape) for p in group])
        for group in bucketize(backward_order, int(bucket_mb * MIB))
    ]


def _dense_or_zeros(parameter: nn.Parameter) -> Tensor:
    """Return a parameter's gradient, (numel,), or zeros. Makes a sparse gradient dense."""
    if parameter.grad is None:
        return torch.zeros_like(to_local(parameter).reshape(-1))
    if parameter.grad.is_sparse:
        parameter.grad = parameter.grad.to_dense()
    return to_local(parameter.grad).reshape(-1)


def _as_gradient(parameter: Tensor, values: Tensor) -> Tensor:
    return as_shard(values, parameter) if isinstance(parameter, DTensor) else values


def with_own_group(axis: Axis) -> Axis:
    """Return the axis with a process group of its own on the CPU. Collective over the world.

    Messages of the backward pass then do not mix with other messages of the axis.
    """
    return replace(axis, group=axis.new_group()) if axis.device.type == "cpu" else axis


Wait = Callable[[], object]
"""Waits for a mean that is not finished."""


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

    def start_mean(self, message: Tensor, members: Sequence[BucketEntry] = ()) -> Wait:
        """Start to replace `message` by its mean over ranks. Collective.

        Args: members: parameters whose gradients the message holds. Empty for a message of other
            values, which is averaged without compression.

        Returns: a function that waits for the mean.
        """
        if self._thread is not None:
            return self._thread.submit(self.reduce.mean, message, members).result
        if self.reduce.blocks:
            self.reduce.mean(message, members)
            return no_op
        message.div_(self._num_ranks)
        work = dist.all_reduce(message, group=self._group, async_op=True)
        assert work is not None
        wait: Wait = work.wait
        return wait

    def close(self) -> None:
        """Wait for started means, and release the thread and the process group."""
        if self._thread is not None:
            self._thread.shutdown()
        self._group = None
