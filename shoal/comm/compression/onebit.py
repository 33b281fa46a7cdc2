"""One bit a number: which of two means stands for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.comm.compression.base import add_residual, read, write

GATHER = 0x0102040810204080
"""Eight bytes that are 0 or 1, read as a little-endian integer, times this have their eight
bits in the top byte.
"""
ROW = 1024


@dataclass(frozen=True)
class OneBit:
    """Numbers that are 0 or above become the mean of these, the others the mean of the others.

        message   [mean of the others] [mean of those >= 0] [bits, number 8j + i in bit i of byte j: uint8 ...]
                        in the gradient's dtype

    With this split no other two numbers leave less behind (in squares). A gradient that is not
    finite makes a mean that is not finite; so does one of float64 whose sum overflows.

    Source: Seide et al., 1-Bit Stochastic Gradient Descent, 2014, with one pair of means a message.
    What is left of a
    gradient p of d numbers is at most |p|_2^2 - |p|_1^2 / d in squares. This is the bound of sign and mean magnitude in
    Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression Schemes, 2019.
    """

    keeps_error: ClassVar[bool] = True

    def size_bytes(self, count: int, dtype: torch.dtype) -> int:
        return 2 * dtype.itemsize + _bytes(count)

    def encode(self, gradient: Tensor, memory: Tensor | None, out: Tensor) -> None:
        whole = add_residual(gradient, memory)
        assert memory is not None
        upper = whole >= 0
        means = _means(whole, upper).to(gradient.dtype)
        write(out, means, _pack(upper))
        if means.isfinite().all():
            torch.sub(whole, self.decode(out, len(whole), gradient.dtype), out=memory)

    def decode(self, message: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        means, packed = read(message, (dtype, 2), (torch.uint8, _bytes(count)))
        return _eight_means_a_byte(means).index_select(0, packed.to(torch.int32)).view(-1)[:count]


def _bytes(count: int) -> int:
    return (count + 7) // 8


def _means(whole: Tensor, upper: Tensor) -> Tensor:
    """The means of the lower and the upper numbers, (2,) of float64; 0 where there are none,
    NaN where one is NaN.
    """
    sums = torch.stack([_sum(whole.clamp(max=0)), _sum(whole.clamp(min=0))])
    count = upper.sum()
    return sums / torch.stack([len(whole) - count, count]).clamp(min=1)


def _sum(numbers: Tensor) -> Tensor:
    """The sum in float64, added in an order that does not depend on the number of threads."""
    rows = len(numbers) // ROW
    rest = numbers[rows * ROW :].sum(dtype=torch.float64)
    return numbers[: rows * ROW].view(rows, ROW).sum(1, dtype=torch.float64).sum() + rest


def _pack(bits: Tensor) -> Tensor:
    """(count,) of bool to (count / 8, rounded up) of uint8."""
    eights = F.pad(bits, (0, -len(bits) % 8)).view(torch.int64)
    return (eights * GATHER >> 56).to(torch.uint8)


def _eight_means_a_byte(means: Tensor) -> Tensor:
    """What each byte stands for: (256, 8) in the dtype of `means`."""
    byte, bit = torch.arange(256, device=means.device), torch.arange(8, device=means.device)
    return means[byte[:, None] >> bit & 1]
