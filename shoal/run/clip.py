"""Bounding the norm of all gradients at once, wherever they lie."""

from __future__ import annotations

from torch import Tensor

from shoal.strategies.base import Part, gradient_norm, scale_gradients


def clip(part: Part, max_norm: float) -> Tensor:
    """Scale the global gradients of `part`; the norm before. Collective."""
    gradients = {name: p.grad for name, p in part.owned.items() if p.grad is not None}
    norm = gradient_norm(part, gradients) if part.remote is None else part.remote.norm()
    scale_gradients(part, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
