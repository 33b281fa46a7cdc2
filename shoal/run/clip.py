"""Bounding the norm of all gradients at once, wherever they lie."""

from __future__ import annotations

from torch import Tensor

from shoal.comm.norm import local
from shoal.strategies.base import Part, gradient_norm
from shoal.torch_private.kernels import foreach_mul_


def clip(part: Part, max_norm: float) -> Tensor:
    """Scale the global gradients of `part`; the norm before. Collective."""
    gradients = {name: p.grad for name, p in part.owned.items() if p.grad is not None}
    norm = gradient_norm(part, gradients) if part.remote is None else part.remote.norm()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if gradients:
        foreach_mul_([local(gradient) for gradient in gradients.values()], factor)
    if part.remote is not None:
        part.remote.scale(factor)
    return norm
