"""The numbers of largest magnitude, and where they stand."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor

from shoal.comm.compression.base import add_residual, read, write
from shoal.errors import UsageError

MOST_NUMBERS = 2**31 - 1
"""The most numbers whose indices fit in 32 bits."""
STRIDE = 61
"""One number in so many is looked at to guess the threshold; a prime, so that it does not walk
along a column.
"""


@dataclass(frozen=True)
class TopK:
    """The `fraction` of numbers with the largest magnitude; all others wait in the memory.

        message   [values: the gradient's dtype ...] [their indices, ascending: int32 ...]

    Of equal magnitudes the lowest indices are sent. NaN and infinity count as larger than all
    numbers.

    Source: Aji and Heafield, Sparse Communication for Distributed Gradient Descent, 2017; Stich,
    Cordonnier and Jaggi, Sparsified SGD with Memory, 2018, whose memory holds updates where this
    one holds gradients.

    Args:
        fraction: of the numbers, above 0 and at most 1; taken as the decimal that it prints as.
    """

    fraction: float

    keeps_error: ClassVar[bool] = True

    def num_selected(self, count: int) -> int:
        """How many of `count` numbers a message holds: the fraction, rounded up, and at least
        one.
        """
        if count > MOST_NUMBERS:
            raise UsageError(
                f"topk names places by 32 bits; cut {count:,} numbers in parts of at most "
                f"{MOST_NUMBERS:,}."
            )
        # In binary 0.07 * 100 is a little more than 7.
        return min(count, max(1, math.ceil(Fraction(str(self.fraction)) * count)))

    def size_bytes(self, count: int, dtype: torch.dtype) -> int:
        return self.num_selected(count) * (dtype.itemsize + 4)

    def encode(self, gradient: Tensor, memory: Tensor | None, out: Tensor) -> None:
        whole = add_residual(gradient, memory)
        assert memory is not None
        indices = _largest(whole, self.num_selected(len(whole)))
        values = whole[indices].to(gradient.dtype)
        write(out, values, indices.to(torch.int32))
        if values.isfinite().all():
            memory.copy_(whole)
            memory[indices] -= values

    def decode(self, message: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        kept = self.num_selected(count)
        values, indices = read(message, (dtype, kept), (torch.int32, kept))
        _check(indices, count)
        gradient = torch.zeros(count, dtype=dtype, device=message.device)
        gradient[indices.long()] = values
        return gradient


def _largest(numbers: Tensor, k: int) -> Tensor:
    """The indices, ascending, of the k largest magnitudes; torch.topk leaves open which of
    equal ones it takes.
    """
    if k == len(numbers):
        return torch.arange(k, device=numbers.device)
    magnitudes = numbers.abs().nan_to_num_(nan=math.inf, posinf=math.inf)
    candidates = _candidates(magnitudes, k)
    among = magnitudes[candidates]
    threshold = among.topk(k, sorted=False).values.min()
    above, ties = among > threshold, among == threshold
    return candidates[above | (ties & (ties.cumsum(0) <= k - above.sum()))]


def _candidates(magnitudes: Tensor, k: int) -> Tensor:
    """Indices, ascending, with the k largest among them: as few as a guess allows, for to
    search all takes longer.
    """
    sample = magnitudes[::STRIDE]
    above_guess = min(len(sample), k * 5 // (4 * STRIDE) + 16)
    guess = sample.topk(above_guess, sorted=False).values.min()
    found = (magnitudes >= guess).nonzero().view(-1)
    return found if len(found) >= k else torch.arange(len(magnitudes), device=magnitudes.device)


def _check(indices: Tensor, count: int) -> None:
    """Raises UsageError unless `indices` ascend within 0 to `count` - 1."""
    if len(indices) and not (
        indices[0] >= 0 and indices[-1] < count and (indices[1:] > indices[:-1]).all()
    ):
        raise UsageError(
            f"a message of topk names places that do not ascend from 0 to {count - 1:,}: it is "
            "damaged."
        )
