"""The most common function of a batch: a loss of a model's output and a target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from shoal.strategies.base import ComputeLoss

LossFunction = Callable[[Any, Any], Any]
"""(output, target) -> the mean over the batch, a scalar, or `loss_terms.Counted`."""


def supervised(loss_fn: LossFunction, model: nn.Module) -> ComputeLoss:
    """Return the function (*inputs, target) -> loss_fn(model(*inputs), target)."""

    def compute_loss(*batch: Any) -> Any:
        *inputs, target = batch
        return loss_fn(model(*inputs), target)

    return compute_loss
