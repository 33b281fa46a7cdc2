"""Buckets of Shoal's own: gradients of small models, of shards and of stages; compressed ones.

      small model, pipeline   backward ▓▓▓▓▓▓▓▓▓▓ ── bucket 1 ── bucket 2 and totals

      else                    backward ▓▓▓▓▓▓▓▓▓▓           parameters in reverse order; a bucket is
                              └ bucket 1 ┐ └ bucket 2 ┐     sent once its gradients are there and
                                              totals        all buckets before it have been sent

For up to a few MiB on the CPU hooks in the backward pass would cost more time than they save. A
pipeline accumulates a gradient in several passes, and all of them come first.

The last message has the totals and the flags; on a GPU the flags go over the CPU. A flag says that
this rank has a gradient. This message is never compressed. For a small model it is the last bucket
with the totals and the flags behind it. A parameter that no rank has used keeps `.grad = None`.
Each rank of a tensor group sends its shards along a data axis of its own. Buckets depend on the
model alone, so a resumed run sends the same messages as an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.comm.assembly import as_shard
from shoal.comm.axis import Axis
from shoal.comm.buckets import bucketize
from shoal.comm.compression.base import BucketEntry
from shoal.comm.norm import to_local
from shoal.platform.tensors import MIB, dense, tensor_on
from shoal.platform.torch_private.kernels import flatten_dense_tensors, foreach_copy_
from shoal.strategies.base import (
    NONFINITE,
    TOTALS_LENGTH,
    Forward,
    LocalBatch,
    LocalModel,
    StepResult,
    no_op,
)
from shoal.strategies.ddp.gradient_reducer import GradientReducer
from shoal.strategies.ddp.reduce_functions import RankOrderMean, ReduceFunction
from shoal.strategies.grad_checks import accumulated_twice_error, has_finite_sum
from shoal.strategies.module_snapshot import BufferSync

Wait = Callable[[], object]
"""Waits for a mean that is not finished."""


class Bucket:
    """Parameters of one dtype whose gradients are sent in one message.

    Args: parameters: by name. A DTensor counts with its shard on this rank.

    Attributes:
        members: their names and shapes on this rank.
        counts, numel: elements of each, and of all.
        missing: names of those that have no gradient yet in this backward pass.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = [*parameters.values()]
        self.members = [BucketEntry(name, to_local(p).shape) for name, p in parameters.items()]
        self.counts = [member.count for member in self.members]
        self.numel = sum(self.counts)
        self.missing: set[str] = set()

    @property
    def dtype(self) -> torch.dtype:
        return self.parameters[0].dtype

    def pack(self, *more: Tensor) -> Tensor:
        """Return the gradients one after the other, zeros for missing ones, and then `more`."""
        return flatten_dense_tensors([*map(_own_gradient, self.parameters), *more])

    def unpack(self, message: Tensor, used: Iterator[bool]) -> list[str]:
        """Copy means to the gradients, and return the names of the parameters that have one.

        Args:
            message: of `pack`, after its mean.
            used: for each parameter, True if any rank had a gradient. Else it gets None.
        """
        names: list[str] = []
        gradients: list[Tensor] = []
        found: list[Tensor] = []
        pieces = message.split_with_sizes([*self.counts, message.numel() - self.numel])
        for member, parameter, piece in zip(self.members, self.parameters, pieces, strict=False):
            if not next(used):
                parameter.grad = None
                continue
            names.append(member.name)
            if parameter.grad is None:
                empty = torch.empty_like(to_local(parameter))
                own: Tensor = parameter
                parameter.grad = as_shard(empty, own) if isinstance(own, DTensor) else empty
            gradients.append(to_local(parameter.grad))
            found.append(piece.view_as(gradients[-1]))
        if gradients:
            foreach_copy_(gradients, found)
        return names


def bucketize_backward(parameters: Mapping[str, nn.Parameter], bucket_mb: float) -> list[Bucket]:
    """Return buckets in the reverse order of parameters, in which most gradients arrive.

    Args: bucket_mb: size of a bucket in MiB. A larger parameter has a bucket of its own.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    groups = bucketize(reversed([*parameters.values()]), int(bucket_mb * MIB))
    return [Bucket({names[id(parameter)]: parameter for parameter in group}) for group in groups]


def _own_gradient(parameter: nn.Parameter) -> Tensor:
    """Return a parameter's gradient on this rank, or zeros. Makes a sparse gradient dense."""
    if parameter.grad is None:
        return torch.zeros_like(to_local(parameter))
    if parameter.grad.is_sparse:
        parameter.grad = dense(parameter.grad)
    return to_local(parameter.grad)


_cached_tensor = lru_cache(maxsize=64)(tensor_on)
"""Flags as numbers: they are the same in nearly every step."""


class OwnBuckets(GradientReducer):
    """Averages gradients in buckets, beside the backward pass or after it.

    Messages start in the same order on all ranks:

          reduce function         device    runs
          backend's all-reduce    any       asynchronously
          any other               CPU       in one thread
          any other               GPU       in the caller's thread; kernel launches do not block

    Args:
        axis: ranks that average their gradients, and take the first rank's buffers.
        buckets: buckets of all parameters, in the order in which they are sent.
        reduce: averages over the same ranks; in a group of its own if messages overlap with others.
        overlaps: buckets are sent while the backward pass goes on; else after it.
    """

    def __init__(
        self,
        model: LocalModel,
        axis: Axis,
        buckets: Sequence[Bucket],
        reduce: ReduceFunction,
        overlaps: bool,
    ) -> None:
        super().__init__(model, reduce, axis.size)
        self.buckets = buckets
        self._axis = axis
        self._overlaps = overlaps
        self._buffers = BufferSync(model.module, axis)
        self._joins_last = (
            not overlaps
            and axis.device.type == "cpu"
            and isinstance(reduce, RankOrderMean)
            and {bucket.dtype for bucket in buckets} in ({torch.float32}, {torch.float64})
        )
        self._flags_go_alone = axis.host_device != axis.device
        self._is_last_pass: bool | None = None  # None outside of passes: hooks do nothing
        self._sent: list[tuple[Tensor, Wait]] = []
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(
                partial(self._on_grad_ready, bucket, member.name)
            )
            for bucket in (buckets if overlaps else ())
            for member, parameter in zip(bucket.members, bucket.parameters, strict=True)
        ]
        self._thread: ThreadPoolExecutor | None = None
        if overlaps and reduce.blocks and axis.device.type == "cpu":
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="bucket-mean")

    def start_step(self) -> None:
        for _, wait in self._sent:
            wait()
        self._sent.clear()
        self.reduce.finish_step(())
        self._buffers.broadcast()

    def run(self, forward: Forward, batch: LocalBatch) -> StepResult:
        """Compute one micro-batch, or all micro-batches that a pipeline makes of it."""
        for bucket in self.buckets if self._overlaps else ():
            bucket.missing = {member.name for member in bucket.members}
        self._is_last_pass = batch.is_last_microbatch
        try:
            return self.model.run(forward, batch)
        finally:
            self._is_last_pass = None

    def finish_step(self, totals: Tensor) -> Tensor:
        has_grad = (p.grad is not None for bucket in self.buckets for p in bucket.parameters)
        flags = (*has_grad, self._buffers.changed())
        while len(self._sent) < len(self.buckets) - self._joins_last:
            self._send_next()
        *used, changed = self._exchange_totals(totals, flags)
        self._buffers.record_change(changed)
        remaining = iter(used)
        names: list[str] = []
        for bucket, (message, wait) in zip(self.buckets, self._sent, strict=True):
            wait()
            names += bucket.unpack(message, remaining)
        self._sent.clear()
        self.reduce.finish_step(names)
        return totals

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._thread is not None:
            self._thread.shutdown()
        self._axis = replace(self._axis, group=None)
        super().close()

    def _exchange_totals(self, totals: Tensor, flags: tuple[bool, ...]) -> list[bool]:
        """Replace totals by their mean; return for each flag if any rank has set it. Collective.

        After the backward pass of a small model the last bucket is sent with them.
        """
        last = self.buckets[-1] if self._joins_last else Bucket({})
        dtype = last.dtype if last.parameters else torch.float64
        # To read flags on a GPU would synchronise, so they are summed on the CPU.
        own = _cached_tensor(() if self._flags_go_alone else flags, dtype, totals.device)
        message = last.pack(totals.to(dtype), own)
        if last.parameters:
            self._look(last, message)
        rest = message[last.numel :]
        if self.model.finite_check.found:
            rest[NONFINITE] = 1.0
        self._start_mean(message)()
        if last.parameters:
            self._sent.append((message, no_op))
        totals.copy_(rest[:TOTALS_LENGTH])
        if self._flags_go_alone:
            return [share > 0 for share in self._axis.sum_of_host_numbers(flags)]
        return [share > 0 for share in rest.tolist()[TOTALS_LENGTH:]]

    def _on_grad_ready(self, bucket: Bucket, name: str, _: Tensor) -> None:
        if self._is_last_pass is None:
            return
        if name not in bucket.missing:
            raise accumulated_twice_error(name)
        bucket.missing.remove(name)
        while self._is_last_pass and len(self._sent) < len(self.buckets):
            if self.buckets[len(self._sent)].missing:
                return
            self._send_next()

    def _send_next(self) -> None:
        """Start the mean of the next bucket. Collective."""
        bucket = self.buckets[len(self._sent)]
        message = bucket.pack()
        self._look(bucket, message)
        self._sent.append((message, self._start_mean(message, bucket.members)))

    def _look(self, bucket: Bucket, message: Tensor) -> None:
        """Find gradients of a bucket that are not finite."""
        check = self.model.finite_check
        check.has_looked = True
        if check.enabled and not has_finite_sum(message):
            pairs = zip(reversed(bucket.members), reversed(bucket.parameters), strict=True)
            check.look({member.name: parameter.grad for member, parameter in pairs})

    def _start_mean(self, message: Tensor, members: Sequence[BucketEntry] = ()) -> Wait:
        """Start to replace `message` by its mean over ranks; return what waits for it. Collective.

        Args: members: parameters whose gradients the message holds. Empty for a message of other
            values, which is averaged without compression.
        """
        if self._thread is not None:
            return self._thread.submit(self.reduce.mean, message, members).result
        if self.reduce.blocks or not self._overlaps:
            self.reduce.mean(message, members)
            return no_op
        message.div_(self.num_ranks)
        work = dist.all_reduce(message, group=self.reduce.axis.group, async_op=True)
        assert work is not None
        wait: Wait = work.wait
        return wait
