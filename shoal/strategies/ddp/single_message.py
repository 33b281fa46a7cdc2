"""One message for all gradients of a small model, sent after the backward pass.

      backward ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓ ── copy ── mean over ranks ── each `.grad` is a view of the message

      message   │ gradient │ gradient │ ... │ totals │ flags │

      flags     one for each gradient that this rank has, and one for a changed buffer

Hooks and buckets in the backward pass would cost more time than so small a message. The message
has a fixed layout, so unused parameters need no search of the autograd graph: the flags say which
gradients each rank has. A parameter used on any rank gets the mean in the same step; one used on
none keeps `.grad = None`. A gradient may be accumulated in several parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.comm.axis import Axis
from shoal.platform.tensors import dense
from shoal.platform.torch_private.kernels import foreach_copy_
from shoal.strategies.base import NONFINITE, TOTALS_LENGTH, LocalModel
from shoal.strategies.buffer_versions import BufferSync
from shoal.strategies.ddp.gradient_reducer import GradientLayout
from shoal.strategies.ddp.reduce_functions import ReduceFunction


class SingleMessage(GradientLayout):
    """One message for the gradients of a model for which `fits_in_single_message` is True."""

    def __init__(self, model: LocalModel, axis: Axis, reduce: ReduceFunction) -> None:
        super().__init__(model)
        self._reduce = reduce
        self._parameters = [*model.trainable_params.values()]
        count = len(self._parameters)
        num_elements = sum(parameter.numel() for parameter in self._parameters)
        sizes = [*(parameter.numel() for parameter in self._parameters), TOTALS_LENGTH, count + 1]
        self._message = torch.zeros(sum(sizes), dtype=self._parameters[0].dtype)
        pieces: list[Tensor] = [*self._message.split(sizes)]
        self._gradients = self._message[:num_elements]
        self._flags = pieces.pop()
        self._totals = pieces.pop()
        pairs = zip(self._parameters, pieces, strict=True)
        self._means = [_view_as(parameter, piece) for parameter, piece in pairs]
        self._named_means = dict(zip(model.trainable_params, self._means, strict=True))
        self._known_flags: list[float] = []  # content of `_flags` after the last step
        self._buffers = BufferSync(model.module, axis)

    def start_step(self) -> None:
        self._buffers.broadcast()

    def finish_step(self, totals: Tensor) -> Tensor:
        self._fill(totals)
        self._known_flags = []  # unknown while the message is sent, also after an error
        self._reduce.mean(self._message)
        self._known_flags = self._flags.tolist()
        *used, changed = self._known_flags
        self._buffers.record_change(changed > 0)
        for parameter, gradient, ranks in zip(self._parameters, self._means, used, strict=True):
            parameter.grad = gradient if ranks else None
        return self._totals.clone()  # the next step overwrites it

    def _fill(self, totals: Tensor) -> None:
        """Copy this rank's gradients, totals and flags to the message."""
        grads = [parameter.grad for parameter in self._parameters]
        gradients: list[Tensor] = []
        places: list[Tensor] = []
        for gradient, place in zip(grads, self._means, strict=True):
            if gradient is None:
                place.zero_()
            else:
                gradients.append(dense(gradient))
                places.append(place)
        sources, targets = [totals], [self._totals]
        flags = [*(gradient is not None for gradient in grads), self._buffers.changed()]
        if flags != self._known_flags:  # else the message has them already
            sources.append(torch.tensor(flags, dtype=self._message.dtype))
            targets.append(self._flags)
        foreach_copy_([*targets, *places], [*sources, *gradients])
        check = self.model.finite_check
        check.has_looked = True
        if check.look(self._named_means, self._gradients):
            self._totals[NONFINITE] = 1.0


def _view_as(parameter: Tensor, piece: Tensor) -> Tensor:
    """View `piece`, (parameter.numel(),), in the parameter's shape and order of dims."""
    strides = torch.empty_like(parameter).stride()  # without gaps in memory
    return piece.as_strided(parameter.shape, strides)
