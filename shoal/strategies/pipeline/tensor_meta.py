"""What a header says of the tensors that cross a cut: their number, types and shapes, and who
has a gradient.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.errors import UsageError
from shoal.platform.tensors import DTYPE_NUMBERS, DTYPES

HEADER = 256
"""Numbers in a header."""


class TensorMeta(NamedTuple):
    """What a tensor looks like."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    has_gradient: bool


Forms = tuple[TensorMeta, ...]
Present = tuple[bool, ...]
"""Which of the values that can have a gradient have one."""


def encoded(forms: Forms, device: torch.device) -> Tensor:
    """As numbers, (HEADER,), int64. Raises UsageError: they are too many for one."""
    numbers = [len(forms)]
    for form in forms:
        numbers += [DTYPE_NUMBERS[form.dtype], form.has_gradient, len(form.shape), *form.shape]
    if len(numbers) > HEADER:
        raise UsageError(
            f"pipeline: {len(forms)} tensors cross one cut, more than a header describes. Put the "
            "cut where fewer do, "
            "with cuts=NAME."
        )
    return torch.tensor(numbers + [0] * (HEADER - len(numbers)), dtype=torch.int64, device=device)


def decoded(header: Tensor) -> Forms:
    """The inverse."""
    numbers = deque(header.tolist())
    forms = []
    for _ in range(numbers.popleft()):
        dtype, has_gradient, dims = numbers.popleft(), numbers.popleft(), numbers.popleft()
        forms.append(
            TensorMeta(
                DTYPES[dtype], tuple(numbers.popleft() for _ in range(dims)), bool(has_gradient)
            )
        )
    return tuple(forms)


def encode_mask(present: Present, device: torch.device) -> Tensor:
    """As numbers, one for each, int64."""
    return torch.tensor(present, dtype=torch.int64, device=device)


def decoded_present(header: Tensor) -> Present:
    """The inverse."""
    return tuple(bool(number) for number in header.tolist())


def describe_mask(present: Present) -> str:
    """For a message: which of them have a gradient."""
    return ", ".join(f"number {index}" for index, there in enumerate(present) if there) or "none"


def describe(forms: Forms) -> str:
    """For a message."""
    return ", ".join(f"{form.dtype} {list(form.shape)}" for form in forms)
