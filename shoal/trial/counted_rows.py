"""Operators that count or order the rows of a batch, by which later batches may couple them.

    rows = (expert == 2).nonzero()[:capacity]      what is beyond the capacity is dropped:
    place = mask.cumsum(0)                         coupled as soon as a batch has so many

Where the first trial sees such an operator, the models are tried again in later steps. Most of
what has one is a mean all the same; these trials cost two passes each, and there are few.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.platform.torch_private.tensor_state import schema_of

_OF_ALL = ("nonzero", "masked_select", "unique_dim", "bincount")
_ALONG_DIM = ("cumsum", "sort", "topk", "kthvalue", "sum")
_COUNTABLE = (torch.bool, torch.int64, torch.int32)


def counts_rows(func: Any, args: Any, kwargs: dict[str, Any], num_rows: int) -> bool:
    """Return True for an operator of a pass of `num_rows` rows that counts or orders rows."""
    name = str(func.overloadpacket).removeprefix("aten.")
    if name == "index":
        return any(isinstance(each, Tensor) and each.dtype is torch.bool for each in args[1])
    if name not in _OF_ALL and name not in _ALONG_DIM:
        return False
    values = args[0]
    if name == "sum" and values.dtype not in _COUNTABLE:
        return False
    given = None if name in _OF_ALL else _dims(func, args, kwargs)
    dims = range(values.dim()) if not given and given != 0 else given
    dims = (dims,) if isinstance(dims, int) else dims
    return any(_has_rows(values, dim, num_rows) for dim in dims)


def _dims(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the argument `dim` of a call: a number, a list, or None for all."""
    for index, argument in enumerate(schema_of(func).arguments):
        if argument.name == "dim":
            default = argument.default_value if argument.has_default_value() else None
            return args[index] if index < len(args) else kwargs.get("dim", default)
    return None


def _has_rows(values: Tensor, dim: int, num_rows: int) -> bool:
    size = values.shape[dim] if values.dim() else 0
    return size > 0 and size % num_rows == 0
