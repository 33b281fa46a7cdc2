"""Calls of `forward_backward` before one step add their gradients up, as backward passes do."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from shoal.strategies.base import LocalModel


def take_gradients(part: LocalModel) -> dict[nn.Parameter, Tensor]:
    """Gradients of earlier calls, out of the way of what is done to this call's; none after
    `zero_grad()`.

    Copies, for they may lie in a bucket that this call will fill again.
    """
    earlier = {p: p.grad.clone() for p in part.trainable_params.values() if p.grad is not None}
    for parameter in earlier:
        parameter.grad = None
    return earlier


def add_gradients(earlier: Mapping[nn.Parameter, Tensor]) -> None:
    """Put back what `take_gradients` took, added to this call's."""
    for parameter, gradient in earlier.items():
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
