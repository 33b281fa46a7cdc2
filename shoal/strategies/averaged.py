"""Means over the data axis of gradients that DistributedDataParallel does not take: of slices, of a pipeline's stages,
and those that are sent in fewer bytes.

      backward ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓                 parameters in the reverse of their order, in buckets; a bucket is sent
               └ bucket 1 ┐ └ bucket 2 ┐         once its gradients are there and those before it are under way
                                     totals      ride in the last one, with how many ranks had each gradient

      f0 f1 b0 f2 b1 b2 ── bucket 1 ─ bucket 2   in a pipeline gradients are whole only after the last of many passes:
                                     totals      all are sent then; what that shows is one micro-batch's passes

Each rank of a tensor group sends its slices along a data axis of its own. What no rank has a gradient of gets none.
Buckets follow from the model alone, so that a resumed run sends the messages of the undisturbed one. The totals are
never compressed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.comm.axis import Axis
from shoal.comm.buckets import buckets
from shoal.comm.fewer import Member, Reduction, plain_bytes
from shoal.comm.norm import local
from shoal.comm.ordered import needs_order, ordered_mean
from shoal.strategies.base import SLOTS, Batch, Forward, Loss, Part
from shoal.strategies.buffers import SharedBuffers
from shoal.strategies.state import StrategyState
from shoal.strategies.whole_gradients import WholeGradients
from shoal.tensors import MIB

LOST = (
    "compress: the number of ranks has changed, and what messages had left out was each rank's own: it is lost, and "
    "the memories begin at zero"
)


class _Waits(Protocol):
    def wait(self) -> Any: ...


class Averaged(StrategyState):
    """Takes steps whose gradients are averaged beside the backward pass. Made on every rank of the world together.

    Args:
        bucket_mb: size of what is sent at once, in MiB.
        reduction: how a bucket becomes the mean over ranks; None for the exact mean.
    """

    said: tuple[str, ...] = ()

    def __init__(self, part: Part, data: Axis, bucket_mb: float, reduction: Reduction | None = None) -> None:
        self.part, self.data, self.reduction = part, data, reduction
        names = {id(parameter): name for name, parameter in part.owned.items()}
        self.buckets = [
            _Bucket(members, [Member(names[id(p)], local(p).shape) for p in members])
            for members in buckets(reversed([*part.owned.values()]), int(bucket_mb * MIB))
        ]
        self.sender = _Sender(data, reduction, beside=not part.passes.complete_after_run)
        self.reducing, self.next = False, 0
        self.buffers = SharedBuffers(part.module, data)
        # After many passes all are sent at the end, however many pieces they came in.
        self.whole_gradients = WholeGradients({} if part.passes.complete_after_run else part.owned)
        for bucket in self.buckets if not part.passes.complete_after_run else []:
            for parameter in bucket.members:
                parameter.register_post_accumulate_grad_hook(partial(self._arrived, bucket))

    def run(self, forward: Forward, batch: Batch) -> Loss:
        """One micro-batch, or all that a pipeline makes of it.

        Gradients become means over ranks, and the objectives of all ranks are to be summed.
        """
        if batch.before is None:  # once a step: ranks may have different numbers of micro-batches
            self._begin()
        self.reducing, self.next = batch.last, 0
        for bucket in self.buckets:
            bucket.missing = len(bucket.members)
        with self.whole_gradients.during():
            loss = self.part.run(forward, batch._replace(scale=batch.scale * self.data.size))
        if not batch.last:
            return loss
        return Loss(self._finish(loss.totals), loss.weighed)

    def close(self) -> None:
        """Let go of the process group."""
        self.sender.close()

    def bytes_a_step(self) -> tuple[int, int]:
        """What this rank sends for gradients in a step, and what it would send without the reduction."""
        ranks, found, plain = self.data.size, 0, 0
        for bucket in self.buckets:
            dtype, count = bucket.members[0].dtype, sum(member.count for member in bucket.described)
            plain += plain_bytes(count, dtype, ranks)
            if self.reduction is not None:
                found += self.reduction.sent_bytes(bucket.described, dtype, ranks)
        return found, plain

    # What is kept from step to step

    def agree(self) -> bool:
        """Ranks are never apart."""
        return False

    def state(self) -> dict[str, Tensor]:
        return {}

    def private(self) -> dict[str, Tensor]:
        return {} if self.reduction is None else self.reduction.private()

    def load(self, state: Mapping[str, Tensor], private: Mapping[str, Tensor]) -> list[str]:
        assert self.reduction is not None
        self.reduction.load(private)
        return [] if private else [LOST]

    def _begin(self) -> None:
        for bucket in self.buckets:
            bucket.forget()
        if self.reduction is not None:
            self.reduction.keep(())
        self.buffers.share()

    def _arrived(self, bucket: _Bucket, _: Tensor) -> None:
        bucket.missing -= 1
        while self.reducing and self.next < len(self.buckets) and self.buckets[self.next].missing <= 0:
            self._send()

    def _send(self) -> None:
        bucket = self.buckets[self.next]
        self.next += 1
        bucket.sent = self.sender.mean(bucket.packed(), bucket.described)

    def _finish(self, totals: Tensor) -> Tensor:
        """Send what is left, and put means in the place of gradients. Gives the totals of all ranks, as a mean."""
        had = [parameter.grad is not None for bucket in self.buckets for parameter in bucket.members]
        had.append(self.buffers.changed())
        while self.next < len(self.buckets):
            self._send()
        message = torch.cat((totals.double(), torch.tensor(had, dtype=torch.float64, device=totals.device)))
        last = self.sender.mean(message)
        last.wait()
        used = (message[SLOTS:] > 0).tolist()
        arrived: list[str] = []
        for bucket in self.buckets:
            count = len(bucket.members)
            bucket.unpack(used[:count])
            arrived += [member.name for member, had in zip(bucket.described, used[:count], strict=True) if had]
            used = used[count:]
        if self.reduction is not None:
            self.reduction.keep(arrived)
        self.buffers.saw(used[0])
        return message[:SLOTS].to(totals.dtype)


class _Bucket:
    """Parameters of one type, whose gradients are sent together."""

    def __init__(self, members: list[nn.Parameter], described: list[Member]) -> None:
        self.members, self.described, self.missing = members, described, len(members)
        self.message: Tensor | None = None
        self.sent: _Waits | None = None

    def packed(self) -> Tensor:
        for parameter in self.members:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        pieces = [local(p if p.grad is None else p.grad).reshape(-1) for p in self.members]
        missing = [p.grad is None for p in self.members]
        self.message = torch.cat([torch.zeros_like(x) if none else x for x, none in zip(pieces, missing, strict=True)])
        return self.message

    def forget(self) -> None:
        """Let go of what a step that was broken off has sent."""
        if self.sent is not None:
            self.sent.wait()
        self.message = self.sent = None

    def unpack(self, used: list[bool]) -> None:
        assert self.sent is not None
        assert self.message is not None
        self.sent.wait()
        sizes = [local(parameter).numel() for parameter in self.members]
        for parameter, mean, any_rank in zip(self.members, self.message.split(sizes), used, strict=True):
            if not any_rank:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = _like(parameter, mean.view_as(local(parameter)).clone())
            else:
                local(parameter.grad).copy_(mean.view_as(local(parameter)))
        self.message = self.sent = None


class _Sender:
    """Means in place, one after the other in the order in which they are asked for.

    Args:
        reduction: how a bucket becomes a mean; None for the exact one.
        beside: something else may be sent meanwhile.
    """

    def __init__(self, data: Axis, reduction: Reduction | None, beside: bool) -> None:
        self.data, self.reduction = data, reduction
        # A group of its own: what is sent beside the backward pass must not come between other messages.
        self.group = data.new_group() if beside and data.device.type == "cpu" else data.group
        works_beside = needs_order(data) or (reduction is not None and data.device.type == "cpu")
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="ordered-mean") if works_beside else None

    def mean(self, message: Tensor, members: Sequence[Member] = ()) -> _Waits:
        """Of what is no bucket, which has no members, exactly."""
        if self.worker is not None:
            return _Done(self.worker.submit(self._reduce, message, members))
        if self.reduction is not None:
            self._reduce(message, members)
            return _Nothing()
        work: _Waits = dist.all_reduce(message.div_(self.data.size), group=self.group, async_op=True)
        return work

    def _reduce(self, message: Tensor, members: Sequence[Member]) -> None:
        if self.reduction is not None and members:
            self.reduction.mean(message, members, self.group)
        else:
            ordered_mean(message, self.group)

    def close(self) -> None:
        if self.worker is not None:
            self.worker.shutdown()
        self.group = None


class _Done:
    def __init__(self, future: Future[None]) -> None:
        self.future = future

    def wait(self) -> None:
        self.future.result()


class _Nothing:
    def wait(self) -> None:
        """It has been waited for."""


def _like(parameter: Tensor, own: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return own
    return DTensor.from_local(own, parameter.device_mesh, parameter.placements, run_check=False)
