"""Buckets of Shoal's own, for gradients that DistributedDataParallel does not take.

These are gradients of shards, gradients of a pipeline's stages, and compressed gradients.

      backward ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓                 parameters in reverse order; a bucket is sent once
               └ bucket 1 ┐ └ bucket 2 ┐         its gradients are there and all buckets before it
                                     totals      have been sent

      f0 f1 b0 f2 b1 b2 ── bucket 1 ─ bucket 2   pipeline: gradients are complete only after the
                                     totals      last of many passes; all buckets are sent then

The last message has the totals and the flags; on a GPU the flags go over the CPU. A flag says that
this rank has a gradient. This message is never compressed. A parameter that no rank has used keeps
`.grad = None`. Each rank of a tensor group sends its shards along a data axis of its own. Buckets
depend on the model alone, so a resumed run sends the same messages as an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from shoal.comm.axis import Axis
from shoal.strategies.base import (
    NONFINITE,
    TOTALS_LENGTH,
    Forward,
    LocalBatch,
    LocalModel,
    StepResult,
)
from shoal.strategies.buffer_versions import BufferSync
from shoal.strategies.ddp.gradient_bucket import BucketWorker, GradientBucket
from shoal.strategies.ddp.gradient_reducer import GradientLayout
from shoal.strategies.grad_checks import AccumulatedOnceCheck


class OverlappedBuckets(GradientLayout):
    """Buckets that are reduced while the backward pass goes on.

    Args:
        axis: ranks that average their gradients, and take the first rank's buffers.
        buckets: buckets of all parameters, in the order in which they are sent.
        worker: averages over the same ranks.
    """

    def __init__(
        self,
        model: LocalModel,
        axis: Axis,
        buckets: Sequence[GradientBucket],
        worker: BucketWorker,
    ) -> None:
        super().__init__(model)
        self.buckets = buckets
        self._worker = worker
        self._axis = axis
        self._buffers = BufferSync(model.module, axis)
        self._is_last_batch = False
        self._next = 0  # index of the bucket to be sent next
        # A pipeline accumulates a gradient in several passes, and sends after all of them.
        overlaps = not model.pass_traits.complete_after_run
        self._check = AccumulatedOnceCheck(model.trainable_params if overlaps else {})
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._on_grad_ready, bucket))
            for bucket in (self.buckets if overlaps else ())
            for parameter in bucket.parameters
        ]

    def start_step(self) -> None:
        for bucket in self.buckets:
            bucket.clear()
        self._worker.reduce.finish_step(())
        self._buffers.broadcast()

    def run(self, forward: Forward, batch: LocalBatch) -> StepResult:
        """Compute one micro-batch, or all micro-batches that a pipeline makes of it."""
        self._is_last_batch = batch.is_last_microbatch
        self._next = 0
        for bucket in self.buckets:
            bucket.num_missing = len(bucket.parameters)
        with self._check.during():
            return self.model.run(forward, batch)

    def finish_step(self, totals: Tensor) -> Tensor:
        flags = [p.grad is not None for bucket in self.buckets for p in bucket.parameters]
        flags.append(self._buffers.changed())
        while self._next < len(self.buckets):
            self._send_next()
        check = self.model.finite_check
        if check.found:
            totals = totals.clone()
            totals[NONFINITE] = 1.0
        message, (*used, changed) = self._exchange_totals(totals, flags)
        self._finish_buckets(used)
        self._buffers.record_change(changed)
        return message[:TOTALS_LENGTH].to(totals.dtype)

    def _exchange_totals(self, totals: Tensor, flags: Sequence[bool]) -> tuple[Tensor, list[bool]]:
        """Return the mean of the totals, and for each flag if any rank has set it. Collective."""
        if self._axis.host_device != totals.device:
            # Nobody may wait for a GPU to read flags, so they go over the CPU.
            message = totals.double()
            self._worker.start_mean(message)()
            return message, [count > 0 for count in self._axis.sum_of_host_numbers(flags)]
        flags_sent = torch.tensor(flags, dtype=torch.float64, device=totals.device)
        message = torch.cat((totals.double(), flags_sent))
        self._worker.start_mean(message)()
        return message, (message[TOTALS_LENGTH:] > 0).tolist()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._check.close()
        self._worker.close()
        self._axis = replace(self._axis, group=None)

    def _on_grad_ready(self, bucket: GradientBucket, _: Tensor) -> None:
        bucket.num_missing -= 1
        while self._is_last_batch and self._next_is_complete():
            self._send_next()

    def _next_is_complete(self) -> bool:
        return self._next < len(self.buckets) and self.buckets[self._next].num_missing <= 0

    def _send_next(self) -> None:
        bucket = self.buckets[self._next]
        self._next += 1
        self._look_at(bucket)
        bucket.start_mean(self._worker)

    def _look_at(self, bucket: GradientBucket) -> None:
        """Look for gradients of this rank that are not finite, before they are sent."""
        check = self.model.finite_check
        check.has_looked = True
        pairs = zip(bucket.members, bucket.parameters, strict=True)
        check.look({member.name: parameter.grad for member, parameter in pairs})

    def _finish_buckets(self, used: list[bool]) -> None:
        """Replace gradients by their means.

        Args: used: for each parameter, in the order of buckets, True if any rank had a gradient.
        """
        names: list[str] = []
        start = 0
        for bucket in self.buckets:
            end = start + len(bucket.parameters)
            bucket_used = used[start:end]
            bucket.finish_mean(bucket_used)
            pairs = zip(bucket.members, bucket_used, strict=True)
            names += [member.name for member, by_any_rank in pairs if by_any_rank]
            start = end
        self._worker.reduce.finish_step(names)
