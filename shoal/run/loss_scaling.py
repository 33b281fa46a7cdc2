"""Skip a whole step if any of its gradients overflowed in fp16.

                          .grad
      forward_backward    NaN            overflow: a sum with NaN stays NaN
      forward_backward    NaN + g        still to be skipped, although this call's g is finite
      optimizer.step()    None           set just before, so that the step changes nothing

`zero_grad()` in between removes the overflow with the gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.strategies.base import LocalModel
from shoal.strategies.local_step import gradient_norm
from shoal.strategies.transforms.precision import LossScale, unscale


class LossScaleGuard:
    """Divides gradients by the loss scale, and skips the next step if one of them is not finite."""

    def __init__(
        self, local_model: LocalModel, loss_scale: LossScale, optimizers: Sequence[Optimizer]
    ) -> None:
        self._local_model = local_model
        self._loss_scale = loss_scale
        self._skip_next = False
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._on_step)

    def unscale(self, earlier: Mapping[nn.Parameter, Tensor]) -> None:
        """Divide `.grad`, the gradients of this call, by the loss scale. Collective.

        Args:
            earlier: gradients of earlier calls of the same step, unscaled already.
        """
        names = {parameter: name for name, parameter in self._local_model.trainable_params.items()}
        by_name = {names[parameter]: gradient for parameter, gradient in earlier.items()}
        # An earlier overflow counts only as long as its gradients are there: see `zero_grad`.
        overflowed = self._skip_next and not bool(
            torch.isfinite(gradient_norm(self._local_model, by_name))
        )
        self._skip_next = not unscale(self._local_model, self._loss_scale) or overflowed

    def _on_step(self, *_: Any) -> None:
        # Optimizers leave parameters without a gradient as they are, with their state.
        if self._skip_next:
            for parameter in self._local_model.trainable_params.values():
                parameter.grad = None
        self._skip_next = False
