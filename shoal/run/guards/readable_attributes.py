"""Attributes of a tensor that tell nothing of its values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

_NAMES = (
    *("shape", "device", "dtype", "layout", "is_sparse", "is_meta", "is_cuda", "is_cpu"),
    *("is_leaf", "requires_grad", "grad_fn", "grad", "ndim"),
)

READABLE: frozenset[Callable[..., Any]] = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in _NAMES),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_complex),
        *(Tensor.is_floating_point, Tensor.requires_grad_),
    ]
)
"""Functions that `__torch_function__` is given for them."""
