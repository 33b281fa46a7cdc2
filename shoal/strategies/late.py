"""Gradients that are whole only when a step's passes are all through, as in a pipeline: reduced then, in buckets.

      last backward pass ──> which of them has anybody? ──> [bucket 1] [bucket 2] ... ──> means

What an engine beside the backward pass would hide, the passes of one micro-batch, is a small part of a step of many.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from shoal.comm.axis import Axis
from shoal.comm.norm import local
from shoal.comm.ordered import ordered_mean
from shoal.strategies.base import Batch, Forward, Loss, Part


class Late:
    """Steps of a part with many passes; afterwards gradients are means over the data axis.

    Args: bucket_bytes: of gradients that are reduced at once.
    """

    def __init__(self, part: Part, data: Axis, bucket_bytes: int) -> None:
        self.part, self.data, self.bucket_bytes = part, data, bucket_bytes

    def run(self, forward: Forward, batch: Batch) -> Loss:
        """All passes, then the reduction. Collective."""
        size = self.data.size
        loss = self.part.run(forward, batch._replace(scale=batch.scale * size))
        if not batch.last or size == 1:
            return loss
        fill(self.part.owned, self.data)
        gradients = [local(p.grad) for p in self.part.owned.values() if p.grad is not None]
        for bucket in buckets(gradients, self.bucket_bytes):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            mean(flat, self.data)
            for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(part.view_as(gradient))
        return Loss(self.data.sum(loss.totals) / size, loss.weighed)


def mean(tensor: Tensor, data: Axis) -> None:
    """The mean over ranks, in place; on the CPU summed in their order. Collective."""
    if data.size > 2 and data.device.type == "cpu":
        ordered_mean(tensor, data.group)
    else:
        data.sum(tensor.div_(data.size))


def fill(owned: Mapping[str, nn.Parameter], data: Axis) -> None:
    """Zeros for gradients that only other ranks have; what nobody has stays without. Collective."""
    flags = torch.tensor([p.grad is not None for p in owned.values()], dtype=torch.int64, device=data.device)
    for parameter, users in zip(owned.values(), data.sum(flags).tolist(), strict=True):
        if users and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def buckets(tensors: list[Tensor], size_bytes: int) -> Iterator[list[Tensor]]:
    """The tensors in order, in lists of one type and of about so many bytes."""
    bucket: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        full = filled + tensor.numel() * tensor.element_size() > size_bytes
        if bucket and (full or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, filled = [], 0
        bucket.append(tensor)
        filled += tensor.numel() * tensor.element_size()
    if bucket:
        yield bucket
