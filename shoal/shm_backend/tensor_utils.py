"""Tensors as collectives want them: the numbers in a row, and a row for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.platform.torch_private.tensor_state import is_zerotensor


def flattened(tensor: Tensor) -> Tensor:
    """The numbers of `tensor` in a row, as memory has them: its own where they lie so, else a copy.

    Autograd sees nothing of it. Who writes into it must see with `is_own` whether `tensor` has it.
    """
    data = tensor.data
    if is_flat_contiguous(data):
        return data if data.dim() == 1 else data.view(-1)
    flat = torch.empty(data.numel(), dtype=data.dtype)
    flat.copy_(data.reshape(-1))
    return flat


def is_own(flat: Tensor, tensor: Tensor) -> bool:
    """Whether what `flattened` has made of `tensor` is its own memory."""
    return flat.data_ptr() == tensor.data_ptr()


def is_flat_contiguous(tensor: Tensor) -> bool:
    """Whether its numbers are those in its memory, one after the other: torch puts off changes of
    sign, and keeps no zeros."""
    return (
        type(tensor) is Tensor
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_neg() or tensor.is_conj() or is_zerotensor(tensor))
    )


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
