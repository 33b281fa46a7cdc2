"""A step is skipped as a whole when any of its gradients overflowed in fp16.

      forward_backward    NaN            overflow: what is added to it stays NaN
      forward_backward    NaN + g        still to be skipped, though this call's gradient is fine
      optimizer.step()    none           dropped just before, so the step changes nothing

`zero_grad()` in between takes the overflow away, with the gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.strategies.base import LocalModel, gradient_norm
from shoal.strategies.transforms.precision import LossScale, unscale


class LossScaleGuard:
    """Divides gradients by the scale, and skips the optimizer's next step where one of them was
    not finite.
    """

    def __init__(self, part: LocalModel, loss_scale: LossScale, optimizer: Optimizer) -> None:
        self._part, self._loss_scale, self._skips = part, loss_scale, False
        optimizer.register_step_pre_hook(self._skip)

    def unscale(self, earlier: Mapping[nn.Parameter, Tensor]) -> None:
        """This call's gradients; `earlier` are those of calls before it, which are not in
        `.grad`. Collective.
        """
        names = {parameter: name for name, parameter in self._part.trainable_params.items()}
        known = {names[parameter]: gradient for parameter, gradient in earlier.items()}
        overflowed = self._skips and not bool(torch.isfinite(gradient_norm(self._part, known)))
        self._skips = not unscale(self._part, self._loss_scale) or overflowed

    def _skip(self, *_: Any) -> None:
        if self._skips:
            for parameter in self._part.trainable_params.values():
                parameter.grad = None
        self._skips = False
