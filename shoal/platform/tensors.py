"""Tensor helpers of several packages: dtypes, and lists of tensors as one flat tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MIB = 2**20
NO_WRITES = ("__invert__", "__index__", "__int__", "__init__", "__iter__")
"""Methods whose names look like those of operators in place."""

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.complex64, torch.complex128, torch.complex32),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)
"""Ranks of one run send a dtype as its index in this list. No file contains the index."""
DTYPE_NUMBERS = {dtype: index for index, dtype in enumerate(DTYPES)}


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are summed: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def tensor_on(numbers: Sequence[float] | float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make a tensor of Python numbers on a device, without waiting for it."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    # From pinned memory, which torch keeps until the copy is made.
    return torch.tensor(numbers, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def dense(gradient: Tensor) -> Tensor:
    """Return a dense copy of a sparse gradient (of an embedding); return a dense one unchanged."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def flatten_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Return the values of all tensors, one after the other, (total,), in new memory.

    Args: tensors: at least one, of any shapes; the result has the dtype to which all promote.
    """
    return torch.cat([tensor.flatten() for tensor in tensors])


def unflatten_tensors(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views of `flat` in the shapes of `like`, one after the other.

    Args: flat: (total,) or longer; the rest is padding.
    """
    sizes = [tensor.numel() for tensor in like]
    pieces = flat[: sum(sizes)].split(sizes)
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


def is_in_order(memory_order: Sequence[int]) -> bool:
    """Return True if dims lie in memory as they are numbered."""
    return all(dim == position for position, dim in enumerate(memory_order))


def is_write(name: str) -> bool:
    """Return True for the name of a method or function of torch that writes into its argument."""
    is_operator = name.startswith("__i") and name not in NO_WRITES
    return is_operator or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def in_memory_order(tensor: Tensor, memory_order: Sequence[int]) -> Tensor:
    """Return a dense tensor of these values whose dims lie in this order."""
    order = [*memory_order]
    inverse = [order.index(dim) for dim in range(tensor.dim())]
    return tensor.permute(order).contiguous().permute(inverse)


def dense_strides(shape: Sequence[int], memory_order: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a dense tensor whose dims lie in this order."""
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(memory_order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)
