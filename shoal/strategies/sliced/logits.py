"""Logits of which each rank has a slice of the vocabulary: what the loss needs is exchanged, not the logits.

      rank 0   logits of words 0..3  ── largest, sum of exponentials, the target's ──┐
      rank 1   logits of words 4..7  ── largest, sum of exponentials, the target's ──┴─> 3 numbers a row, not 8

`Logits` has the shape of the whole. Cross-entropy and argmax over the vocabulary know what it is; so do the few
functions that leave the vocabulary alone. Any other function gets the whole, gathered once, as `on_demand.py` has it:
slower, and as exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.comm.axis import Axis
from shoal.comm.exchange import slice_of
from shoal.strategies.sliced.cross_entropy import cross_entropy
from shoal.strategies.sliced.on_demand import OnDemand
from shoal.torch_private.tensor_state import READ_BASE


class Logits(OnDemand):
    """(..., V), of which `own` is this rank's (..., V/T)."""

    @staticmethod
    def of(own: Tensor, axis: Axis) -> Logits:
        return Logits.slices(own, axis, own.dim() - 1)


def _on_own(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """A function that takes each number by itself."""
    return lambda x, *args, **options: x.like(function(x.own, *args, **options))


def _flatten(x: Logits, start_dim: int = 0, end_dim: int = -1) -> Any:
    if x.dim() < 2 or end_dim % x.dim() == x.dim() - 1:
        return NotImplemented
    return x.like(x.own.flatten(start_dim, end_dim))


def _view(x: Logits, *shape: Any) -> Any:
    sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
    if not sizes or sizes[-1] != x.shape[-1]:
        return NotImplemented
    return x.like(x.own.reshape(*sizes[:-1], x.own.shape[-1]))


def _item(x: Logits, index: Any) -> Any:
    """Positions of a sequence, `[..., :-1, :]` say; the vocabulary stays."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is Ellipsis or isinstance(part, (int, slice)) for part in parts):
        return NotImplemented
    full = len(parts) == x.dim() or Ellipsis in parts
    if full and (parts[-1] != slice(None) or parts.count(Ellipsis) > 1):
        return NotImplemented
    return x.like(x.own[index])


def _to(x: Logits, *args: Any, **options: Any) -> Any:
    dtype = args[0] if args else options.get("dtype")
    return x.like(x.own.to(dtype)) if isinstance(dtype, torch.dtype) and len(args) < 2 else NotImplemented


def _argmax(x: Logits, dim: int | None = None, keepdim: bool = False) -> Any:
    if dim is None or dim % x.dim() != x.dim() - 1:
        return NotImplemented
    largest, index = x.own.max(dim=-1, keepdim=keepdim)
    everyone = x.axis.largest(largest.detach().clone(memory_format=torch.contiguous_format))
    words = x.own.shape[-1]
    # The first of equals, as on one device: the largest of what is left to the end.
    left = torch.where(largest == everyone, x.axis.size * words - (index + x.axis.rank * words), 0)
    return x.axis.size * words - x.axis.largest(left)


def _register_hook(x: Logits, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """The hook sees a gradient that is whole where it looks at it."""

    def on_slices(gradient: Tensor) -> Tensor | None:
        seen = Logits.of(gradient, x.axis)
        found = hook(seen)
        if found is None or found is seen:
            return slice_of(seen.whole, x.axis, x.along) if seen.written else None
        return slice_of(found, x.axis, x.along)

    return x.own.register_hook(on_slices)


def _cross_entropy(
    x: Logits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    plain = weight is None and size_average is None and reduce is None
    if not plain or x.dim() > 2 or target.is_floating_point():
        return NotImplemented
    own = x.own.float() if torch.is_autocast_enabled(x.own.device.type) and x.own.dtype.itemsize < 4 else x.own
    losses = cross_entropy(own.view(-1, own.shape[-1]), target.reshape(-1), ignore_index, label_smoothing, x.axis)
    if reduction == "none":
        return losses.view(target.shape)
    total = losses.sum()
    return total / (target != ignore_index).sum() if reduction == "mean" else total


Logits.known = {
    F.cross_entropy: _cross_entropy,
    Tensor.argmax: _argmax,
    torch.argmax: _argmax,
    Tensor.flatten: _flatten,
    torch.flatten: _flatten,
    Tensor.view: _view,
    Tensor.reshape: _view,
    torch.reshape: _view,
    Tensor.__getitem__: _item,
    Tensor.to: _to,
    Tensor.detach: _on_own(Tensor.detach),
    Tensor.float: _on_own(Tensor.float),
    Tensor.double: _on_own(Tensor.double),
    Tensor.contiguous: _on_own(Tensor.contiguous),
    Tensor.clone: _on_own(Tensor.clone),
    Tensor.requires_grad.__get__: lambda x: x.own.requires_grad,  # type: ignore[attr-defined]
    READ_BASE: lambda x: None,
    Tensor.grad_fn.__get__: lambda x: x.own.grad_fn,  # type: ignore[union-attr]
    Tensor.register_hook: _register_hook,
}
