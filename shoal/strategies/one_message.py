"""Means over ranks of a small model's gradients: one message after the backward pass, and no hook inside it.

      backward ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓ ── copied ── mean over ranks ── each `.grad` is its part of the message

      message   │ gradient │ gradient │ ... │ totals │ which gradients this rank had │

A message this small could hardly have been sent beside the backward pass, and hooks and buckets cost more than it does.
It is the same in every run of a model, and no graph has to be searched for what was used: a parameter that some rank
has used gets the mean in that very step, one that no rank has used gets none. A gradient may come in pieces.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.comm.axis import Axis
from shoal.comm.ordered import mean
from shoal.strategies.base import SLOTS, Batch, Forward, Loss, Part
from shoal.strategies.buffers import SharedBuffers
from shoal.tensors import MIB, dense
from shoal.torch_private.kernels import foreach_copy_

SMALL_MIB = 4.0
"""Steps took 0.78 of those with DistributedDataParallel for gradients of 0.07 MiB, 0.87 for 1.1 and as long for 8.3, on
two ranks of a core each; and these gradients are there twice at the end of a backward pass."""


def fits(part: Part, data: Axis, bucket_mb: float) -> bool:
    """Whether one message takes all gradients: plain ones of one type, on the CPU, small, and not more than a bucket.

    Args: bucket_mb: size of a bucket in MiB.
    """
    parameters = part.owned.values()
    if data.device.type != "cpu" or {p.dtype for p in parameters} not in ({torch.float32}, {torch.float64}):
        return False
    return sum(parameter.nbytes for parameter in parameters) <= min(bucket_mb, SMALL_MIB) * MIB


class OneMessage:
    """Takes the steps of a model that `fits`. Made on every rank together."""

    def __init__(self, part: Part, data: Axis) -> None:
        self.part, self.data, self.parameters = part, data, [*part.owned.values()]
        count = len(self.parameters)
        sizes = [*(parameter.numel() for parameter in self.parameters), SLOTS, count + 1]
        self.message = torch.zeros(sum(sizes), dtype=self.parameters[0].dtype)
        pieces: list[Tensor] = [*self.message.split(sizes)]
        self.totals, self.had = pieces[count:]
        self.means = [_laid_out_as(p, piece) for p, piece in zip(self.parameters, pieces[:count], strict=True)]
        self.told: list[float] = []  # what `had` holds since the last step
        self.buffers = SharedBuffers(part.module, data)

    def run(self, forward: Forward, batch: Batch) -> Loss:
        """One micro-batch; gradients and totals become means over ranks with the last one of the step. Collective."""
        if batch.before is None:  # once a step: ranks may have different numbers of micro-batches
            self.buffers.share()
        # The objectives of all ranks are to be summed.
        loss = self.part.run(forward, batch._replace(scale=batch.scale * self.data.size))
        return Loss(self._average(loss.totals), loss.weighed) if batch.last else loss

    def _average(self, totals: Tensor) -> Tensor:
        """Put means in the place of gradients. Gives the totals' mean."""
        gradients = [parameter.grad for parameter in self.parameters]
        sources, targets = [totals], [self.totals]
        for gradient, place in zip(gradients, self.means, strict=True):
            if gradient is None:
                place.zero_()
            else:
                sources.append(dense(gradient))
                targets.append(place)
        had = [*(gradient is not None for gradient in gradients), self.buffers.changed()]
        if had != self.told:  # where all ranks had all, it stands there
            sources.append(torch.tensor(had, dtype=self.message.dtype))
            targets.append(self.had)
        foreach_copy_(targets, sources)
        self.told = []  # until it is known again, whatever happens
        mean(self.message, self.data)
        *used, changed = self.told = self.had.tolist()
        self.buffers.saw(changed > 0)
        for parameter, gradient, ranks in zip(self.parameters, self.means, used, strict=True):
            parameter.grad = gradient if ranks else None
        return self.totals.clone()  # the next step overwrites it


def _laid_out_as(parameter: Tensor, piece: Tensor) -> Tensor:
    """The numbers of `piece` in the parameter's shape, in the order in which the parameter's lie in memory."""
    strides = torch.empty_like(parameter).stride()  # those of a parameter with gaps are without them
    return piece.as_strided(parameter.shape, strides)
