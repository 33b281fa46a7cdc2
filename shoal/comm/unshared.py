"""Copies of tensors that share memory with others, which later steps write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from shoal.comm.norm import to_local

Named = TypeVar("Named", Tensor, Tensor | None)


def unshared(tensors: Mapping[str, Named], live: Iterable[Tensor]) -> dict[str, Named]:
    """Return the tensors, with copies of those that share memory with a tensor of `live`.

    Names of one and the same tensor, such as tied weights, get one copy.
    """
    storages = {_storage(tensor) for tensor in live if tensor.layout is torch.strided}
    copies: dict[tuple[object, ...], Tensor] = {}
    result: dict[str, Named] = {}
    for name, tensor in tensors.items():
        result[name] = tensor
        if tensor is None or (tensor.layout is torch.strided and _storage(tensor) not in storages):
            continue
        local = to_local(tensor)
        is_strided = local.layout is torch.strided
        start = local.data_ptr() if is_strided else id(tensor)
        key = (start, tensor.dtype, tensor.shape, local.shape)
        if key not in copies:
            copies[key] = tensor.detach().clone()
        result[name] = copies[key]
    return result


def _storage(tensor: Tensor) -> int:
    return to_local(tensor).untyped_storage().data_ptr()
