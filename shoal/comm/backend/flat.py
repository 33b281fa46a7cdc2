"""Tensors as collectives want them: the numbers in a row, and a row for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def flattened(tensor: Tensor) -> Tensor:
    """The numbers of `tensor` in a row: its own where they lie so, else a copy. Autograd sees nothing of it."""
    data = tensor.data
    return data if data.dim() == 1 and data.is_contiguous() else data.reshape(-1)


def rows_of(tensor: Tensor, size: int) -> Sequence[Tensor]:
    """A flat buffer as a row for each rank; none where it cannot be cut so."""
    if tensor.numel() % size or not tensor.is_contiguous():
        return ()
    return tensor.data.view(size, tensor.numel() // size).unbind()


def split_for(tensor: Tensor, sizes: Sequence[int], size: int) -> Sequence[Tensor]:
    """What of dimension 0 belongs to each rank."""
    rows: Sequence[Tensor] = tensor.data.split(list(sizes) or [len(tensor) // size] * size)
    return rows


def pairs(first: Sequence[Any], second: Sequence[Any]) -> zip[tuple[Any, Any]]:
    """What belongs together; both are equally long."""
    return zip(first, second, strict=True)
