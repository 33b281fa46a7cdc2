"""One message for a small model's gradients, after the backward pass and without a hook inside it.

      backward ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓ ── copied ── mean over ranks ── each `.grad` is its part of it

      message   │ gradient │ gradient │ ... │ totals │ flags │

      flags     which gradients this rank has, and if its forward pass has changed a buffer

A message this small could hardly have been sent during the backward pass, and hooks and buckets
cost more than it does. Its layout is fixed, so unused parameters need no search of the autograd
graph: the flags say which gradients each rank has. A parameter that some rank has used gets the
mean in that very step; one that no rank has used keeps `.grad = None`. A gradient may be
accumulated in several parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.comm.axis import Axis
from shoal.platform.tensors import dense
from shoal.platform.torch_private.kernels import foreach_copy_
from shoal.strategies.base import TOTALS_LENGTH, LocalModel
from shoal.strategies.ddp.buffer_sync import BufferSync
from shoal.strategies.ddp.gradient_reducer import GradientLayout
from shoal.strategies.ddp.reduce_functions import ReduceFunction


class SingleMessage(GradientLayout):
    """One message for all gradients of a model that `layout_choice.fits_in_single_message`."""

    def __init__(self, part: LocalModel, axis: Axis, reduce: ReduceFunction) -> None:
        super().__init__(part)
        self._reduce = reduce
        self._parameters = [*part.trainable_params.values()]
        count = len(self._parameters)
        sizes = [*(parameter.numel() for parameter in self._parameters), TOTALS_LENGTH, count + 1]
        self._message = torch.zeros(sum(sizes), dtype=self._parameters[0].dtype)
        pieces: list[Tensor] = [*self._message.split(sizes)]
        self._flags = pieces.pop()
        self._totals = pieces.pop()
        pairs = zip(self._parameters, pieces, strict=True)
        self._means = [_view_as(parameter, piece) for parameter, piece in pairs]
        self._known_flags: list[float] = []  # what stands in `_flags` since the last step
        self._buffers = BufferSync(part.module, axis)

    def start_step(self) -> None:
        self._buffers.broadcast()

    def finish_step(self, totals: Tensor) -> Tensor:
        self._fill(totals)
        self._known_flags = []  # unknown until the message is back, whatever happens
        self._reduce.mean(self._message)
        *used, changed = self._known_flags = self._flags.tolist()
        self._buffers.record_change(changed > 0)
        for parameter, gradient, ranks in zip(self._parameters, self._means, used, strict=True):
            parameter.grad = gradient if ranks else None
        return self._totals.clone()  # the next step overwrites it

    def _fill(self, totals: Tensor) -> None:
        """Copy what this rank has into the message, in one call for all."""
        gradients = [parameter.grad for parameter in self._parameters]
        sources = [totals]
        targets = [self._totals]
        for gradient, target in zip(gradients, self._means, strict=True):
            if gradient is None:
                target.zero_()
            else:
                sources.append(dense(gradient))
                targets.append(target)
        flags = [*(gradient is not None for gradient in gradients), self._buffers.changed()]
        if flags != self._known_flags:  # else they stand there already
            sources.append(torch.tensor(flags, dtype=self._message.dtype))
            targets.append(self._flags)
        foreach_copy_(targets, sources)


def _view_as(parameter: Tensor, piece: Tensor) -> Tensor:
    """View `piece`, (parameter.numel(),), in the parameter's shape and order of dimensions."""
    strides = torch.empty_like(parameter).stride()  # without gaps in memory
    return piece.as_strided(parameter.shape, strides)
