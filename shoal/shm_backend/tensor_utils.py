"""Tensors in the forms that collectives need: flat, and in one row for each rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.platform.torch_private.tensor_state import is_zerotensor


def flattened(tensor: Tensor) -> Tensor:
    """Return the elements of `tensor` as a flat tensor: a view if it is contiguous, else a copy.

    Autograd does not record the view, and it is never an inference tensor: threads and later calls
    may write into it outside torch.inference_mode. A caller that writes into the flat tensor must
    give the values back with `write_back` unless `shares_memory` is True.
    """
    data = tensor.data
    if data.is_inference() or torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return _flattened(_normal(data))
    return _flattened(data)


def _flattened(data: Tensor) -> Tensor:
    if is_flat_contiguous(data):
        return data if data.dim() == 1 else data.view(-1)
    flat = torch.empty(data.numel(), dtype=data.dtype)
    flat.copy_(data.reshape(-1))
    return flat


def _normal(data: Tensor) -> Tensor:
    """Return a normal tensor with the memory of an inference tensor, if that is contiguous."""
    if not data.is_inference() or not is_flat_contiguous(data):
        return data
    normal = torch.empty(0, dtype=data.dtype)
    return normal.set_(data.untyped_storage(), data.storage_offset(), (data.numel(),), (1,))


def write_back(flat: Tensor, tensor: Tensor) -> None:
    """Copy `flat`, made by `flattened(tensor)`, into `tensor`."""
    # Only in inference mode may an inference tensor be written.
    with torch.inference_mode(tensor.is_inference()):
        tensor.data.copy_(flat.view(tensor.shape))


def shares_memory(flat: Tensor, tensor: Tensor) -> bool:
    """Return True if `flat`, made by `flattened(tensor)`, is a view and not a copy."""
    return flat.data_ptr() == tensor.data_ptr()


def is_flat_contiguous(tensor: Tensor) -> bool:
    """Return True if the memory of `tensor` holds exactly its elements, one after the other.

    A contiguous tensor may still differ from its memory: torch delays negation and conjugation,
    and its zero tensors have no memory at all."""
    return (
        type(tensor) is Tensor
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_neg() or tensor.is_conj() or is_zerotensor(tensor))
    )


def rows_of(tensor: Tensor, size: int) -> Sequence[Tensor]:
    """Divide a flat buffer into `size` rows; no rows if it cannot be divided evenly."""
    if tensor.numel() % size or not tensor.is_contiguous():
        return ()
    return tensor.data.view(size, tensor.numel() // size).unbind()
