"""Bounding the norm of all gradients at once, wherever they lie."""

from __future__ import annotations

from torch import Tensor

from shoal.strategies.base import LocalModel, gradient_norm, scale_gradients


def clip(part: LocalModel, max_norm: float) -> Tensor:
    """Scale the global gradients of `part`; the norm before. Collective."""
    gradients = {name: p.grad for name, p in part.trainable_params.items() if p.grad is not None}
    norm = (
        gradient_norm(part, gradients)
        if part.remote_optimizer is None
        else part.remote_optimizer.norm()
    )
    scale_gradients(part, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
