"""Logits of which each rank has a slice of the vocabulary: what the loss needs is exchanged, not
the logits.

      rank 0   logits of words 0..3  ── largest, sum of exponentials, the target's ──┐
      rank 1   logits of words 4..7  ── largest, sum of exponentials, the target's ──┴─> 3 numbers a row, not 8

`Logits` has the shape of the whole. Cross-entropy and argmax over the vocabulary know what it is;
so do the few functions that leave the vocabulary alone. Any other function gets the whole, gathered
once, as `on_demand.py` has it: slower, and as exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.comm.axis import Axis
from shoal.comm.mappings import local_slice
from shoal.platform.torch_private.tensor_state import READ_BASE
from shoal.strategies.tensor.cross_entropy import vocab_parallel_cross_entropy
from shoal.strategies.tensor.lazy_gather import LazyGatherTensor


class VocabParallelLogits(LazyGatherTensor):
    """(..., V), of which `own` is this rank's (..., V/T)."""

    @staticmethod
    def of(own: Tensor, axis: Axis) -> VocabParallelLogits:
        return VocabParallelLogits.from_local(own, axis, own.dim() - 1)


def _on_local(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """A function that takes each number by itself."""
    return lambda x, *args, **options: x.like(function(x.local, *args, **options))


def _flatten(x: VocabParallelLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    if x.dim() < 2 or end_dim % x.dim() == x.dim() - 1:
        return NotImplemented
    return x.like(x.local.flatten(start_dim, end_dim))


def _view(x: VocabParallelLogits, *shape: Any) -> Any:
    sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
    if not sizes or sizes[-1] != x.shape[-1]:
        return NotImplemented
    return x.like(x.local.reshape(*sizes[:-1], x.local.shape[-1]))


def _item(x: VocabParallelLogits, index: Any) -> Any:
    """Positions of a sequence, `[..., :-1, :]` say; the vocabulary stays."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is Ellipsis or isinstance(part, (int, slice)) for part in parts):
        return NotImplemented
    full = len(parts) == x.dim() or Ellipsis in parts
    if full and (parts[-1] != slice(None) or parts.count(Ellipsis) > 1):
        return NotImplemented
    return x.like(x.local[index])


def _to(x: VocabParallelLogits, *args: Any, **options: Any) -> Any:
    dtype = args[0] if args else options.get("dtype")
    return (
        x.like(x.local.to(dtype))
        if isinstance(dtype, torch.dtype) and len(args) < 2
        else NotImplemented
    )


def _argmax(x: VocabParallelLogits, dim: int | None = None, keepdim: bool = False) -> Any:
    if dim is None or dim % x.dim() != x.dim() - 1:
        return NotImplemented
    largest, index = x.local.max(dim=-1, keepdim=keepdim)
    everyone = x.axis.all_reduce_max(largest.detach().clone(memory_format=torch.contiguous_format))
    words = x.local.shape[-1]
    # The first of equals, as on one device: the largest of what is left to the end.
    left = torch.where(largest == everyone, x.axis.size * words - (index + x.axis.rank * words), 0)
    return x.axis.size * words - x.axis.all_reduce_max(left)


def _register_hook(x: VocabParallelLogits, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """The hook sees a gradient that is whole where it looks at it."""

    def on_slices(gradient: Tensor) -> Tensor | None:
        seen = VocabParallelLogits.of(gradient, x.axis)
        found = hook(seen)
        if found is None or found is seen:
            return local_slice(seen.full_tensor, x.axis, x.shard_dim) if seen.written else None
        return local_slice(found, x.axis, x.shard_dim)

    return x.local.register_hook(on_slices)


def _cross_entropy(
    x: VocabParallelLogits,
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
    own = (
        x.local.float()
        if torch.is_autocast_enabled(x.local.device.type) and x.local.dtype.itemsize < 4
        else x.local
    )
    losses = vocab_parallel_cross_entropy(
        own.view(-1, own.shape[-1]), target.reshape(-1), ignore_index, label_smoothing, x.axis
    )
    if reduction == "none":
        return losses.view(target.shape)
    total = losses.sum()
    return total / (target != ignore_index).sum() if reduction == "mean" else total


VocabParallelLogits.known = {
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
    Tensor.detach: _on_local(Tensor.detach),
    Tensor.float: _on_local(Tensor.float),
    Tensor.double: _on_local(Tensor.double),
    Tensor.contiguous: _on_local(Tensor.contiguous),
    Tensor.clone: _on_local(Tensor.clone),
    Tensor.requires_grad.__get__: lambda x: x.local.requires_grad,  # type: ignore[attr-defined]
    READ_BASE: lambda x: None,
    Tensor.grad_fn.__get__: lambda x: x.local.grad_fn,  # type: ignore[union-attr]
    Tensor.register_hook: _register_hook,
}
