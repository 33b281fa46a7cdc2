"""Compression to one bit for each element, which selects one of two means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.comm.compression.base import read, write

GATHER = 0x0102040810204080
"""A factor that collects bits: eight bytes of 0 or 1, read as one little-endian integer and
multiplied by it, have their eight bits in the top byte.
"""
ROW = 1024
"""Elements that are summed together; the order of a sum then depends on the length only."""


@dataclass(frozen=True)
class OneBit:
    """Replaces elements >= 0 by their mean, and the other elements by theirs.

        message   [mean of those < 0] [mean of those >= 0] [bits: uint8 ...]
                         in the gradient's dtype           element 8j + i is bit i of byte j

    For this split, no other two values have a smaller squared error. A gradient that is not finite
    gives a mean that is not finite; so does a gradient of float64 whose sum overflows.

    Source: Seide et al., 1-Bit Stochastic Gradient Descent, 2014, with one pair of means for each
    message. The squared residual of a gradient p of d elements is at most |p|_2^2 - |p|_1^2 / d.
    This is the bound of sign and mean magnitude in Karimireddy et al., Error Feedback Fixes SignSGD
    and other Gradient Compression Schemes, 2019.
    """

    keeps_error: ClassVar[bool] = True

    def size_bytes(self, count: int, dtype: torch.dtype) -> int:
        return 2 * dtype.itemsize + _bytes(count)

    def encode(self, gradient: Tensor, memory: Tensor | None, out: Tensor) -> None:
        assert memory is not None, "onebit keeps its error; give it a memory"
        values = memory + gradient  # in the dtype of `memory`
        upper = values >= 0
        means = _means(values, upper).to(gradient.dtype)
        write(out, means, _pack(upper))
        if means.isfinite().all():
            torch.sub(values, self.decode(out, len(values), gradient.dtype), out=memory)

    def decode(self, message: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        means, packed = read(message, (dtype, 2), (torch.uint8, _bytes(count)))
        # The eight elements that each byte encodes, (256, 8).
        byte, bit = torch.arange(256, device=means.device), torch.arange(8, device=means.device)
        of_bytes = means[byte[:, None] >> bit & 1]
        return of_bytes.index_select(0, packed.to(torch.int32)).view(-1)[:count]


def _bytes(count: int) -> int:
    return (count + 7) // 8


def _means(values: Tensor, upper: Tensor) -> Tensor:
    """Return the means of the lower and the upper values, (2,) of float64.

    A mean of no values is 0. If a value is NaN, a mean is NaN.
    """
    sums = torch.stack([_sum(values.clamp(max=0)), _sum(values.clamp(min=0))])
    count = upper.sum()
    return sums / torch.stack([len(values) - count, count]).clamp(min=1)


def _sum(values: Tensor) -> Tensor:
    """Sum in float64, in an order that does not depend on the number of threads."""
    rows = len(values) // ROW
    rest = values[rows * ROW :].sum(dtype=torch.float64)
    return values[: rows * ROW].view(rows, ROW).sum(1, dtype=torch.float64).sum() + rest


def _pack(bits: Tensor) -> Tensor:
    """Pack (count,) of bool into (count / 8, rounded up) of uint8."""
    eights = F.pad(bits, (0, -len(bits) % 8)).view(torch.int64)
    return (eights * GATHER >> 56).to(torch.uint8)
