"""The headers of messages between stages: number, dtypes and shapes of their tensors, and which of
them have a gradient.

      activations   n │ dtype  has_gradient  dims  shape ... │ dtype  ...     256 numbers
      gradients     1 │ 0 │ 1 │ ...                                           one for each value

Headers are int64 tensors, so they travel as every other message does.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.errors import UsageError
from shoal.platform.tensors import DTYPE_NUMBERS, DTYPES

HEADER_LENGTH = 256
"""Numbers in a header of activations. The length is fixed, since the receiver does not know how
many tensors come."""


class TensorMeta(NamedTuple):
    """The dtype and shape of a tensor, and whether the loss is differentiated with respect to
    it.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    has_gradient: bool


TensorMetas = tuple[TensorMeta, ...]
GradMask = tuple[bool, ...]
"""For each value that can have a gradient: whether it has one."""


def encode_metas(metas: TensorMetas, device: torch.device) -> Tensor:
    """Return the header of activations: (HEADER_LENGTH,), int64.

    Raises: UsageError: the tensors are too many for one header.
    """
    numbers = [len(metas)]
    for meta in metas:
        numbers += [DTYPE_NUMBERS[meta.dtype], meta.has_gradient, len(meta.shape), *meta.shape]
    if len(numbers) > HEADER_LENGTH:
        raise UsageError(
            f"pipeline: {len(metas)} tensors cross one cut, more than a header describes. Put the "
            "cut where fewer do, with cuts=NAME."
        )
    padding = [0] * (HEADER_LENGTH - len(numbers))
    return torch.tensor(numbers + padding, dtype=torch.int64, device=device)


def decode_metas(header: Tensor) -> TensorMetas:
    """Return what `encode_metas` has encoded."""
    numbers = deque(header.tolist())
    metas = []
    for _ in range(numbers.popleft()):
        dtype = DTYPES[numbers.popleft()]
        has_gradient = bool(numbers.popleft())
        dims = numbers.popleft()
        shape = tuple(numbers.popleft() for _ in range(dims))
        metas.append(TensorMeta(dtype, shape, has_gradient))
    return tuple(metas)


def encode_mask(mask: GradMask, device: torch.device) -> Tensor:
    """Return the header of gradients: (len(mask),), int64."""
    return torch.tensor(mask, dtype=torch.int64, device=device)


def decode_mask(header: Tensor) -> GradMask:
    """Return what `encode_mask` has encoded."""
    return tuple(bool(value) for value in header.tolist())


def describe_metas(metas: TensorMetas) -> str:
    """Describe tensors for an error message."""
    return ", ".join(
        f"{meta.dtype} {list(meta.shape)} {'with' if meta.has_gradient else 'without'} a gradient"
        for meta in metas
    )


def describe_mask(mask: GradMask) -> str:
    """Name the values that have a gradient, for an error message."""
    present = [f"number {index}" for index, has_gradient in enumerate(mask) if has_gradient]
    return ", ".join(present) or "none"
