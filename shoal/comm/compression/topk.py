"""Compression to the elements of largest magnitude, with their indices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor

from shoal.comm.compression.base import read, write
from shoal.errors import UsageError

MAX_COUNT = 2**31 - 1
"""The largest number of elements whose indices fit in 32 bits."""
STRIDE = 61
"""The stride of the sample from which the threshold is guessed; a prime, so that the sample does
not lie in one column of a matrix.
"""


@dataclass(frozen=True)
class TopK:
    """Sends the `fraction` of elements with the largest magnitude; the memory holds the others.

        message   [values: the gradient's dtype ...] [their indices, ascending: int32 ...]

    Of equal magnitudes, the lowest indices are sent. NaN and infinity count as larger than all
    finite values.

    Source: Aji and Heafield, Sparse Communication for Distributed Gradient Descent, 2017; Stich,
    Cordonnier and Jaggi, Sparsified SGD with Memory, 2018. Their memory holds updates, this one
    holds gradients.

    Args: fraction: above 0 and at most 1. Its value is the decimal that Python prints.
    """

    fraction: float

    keeps_error: ClassVar[bool] = True

    def num_selected(self, count: int) -> int:
        """Return how many of `count` elements a message holds: at least one, rounded up.

        Raises: UsageError: `count` is above MAX_COUNT.
        """
        if count > MAX_COUNT:
            raise UsageError(
                f"topk names places by 32 bits; cut {count:,} numbers in parts of at most "
                f"{MAX_COUNT:,}."
            )
        # Exact arithmetic: with floats, 0.07 * 100 is a little more than 7.
        return min(count, max(1, math.ceil(Fraction(str(self.fraction)) * count)))

    def size_bytes(self, count: int, dtype: torch.dtype) -> int:
        return self.num_selected(count) * (dtype.itemsize + 4)

    def encode(self, gradient: Tensor, memory: Tensor | None, out: Tensor) -> None:
        assert memory is not None, "topk keeps its error; give it a memory"
        total = memory + gradient  # in the dtype of `memory`
        indices = _largest(total, self.num_selected(len(total)))
        values = total[indices].to(gradient.dtype)
        write(out, values, indices.to(torch.int32))
        if values.isfinite().all():
            memory.copy_(total)
            memory[indices] -= values  # not zero: `values` may have a narrower dtype

    def decode(self, message: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        selected = self.num_selected(count)
        values, indices = read(message, (dtype, selected), (torch.int32, selected))
        if selected and not (
            indices[0] >= 0 and indices[-1] < count and (indices[1:] > indices[:-1]).all()
        ):
            raise UsageError(
                f"a message of topk names places that do not ascend from 0 to {count - 1:,}: it is "
                "damaged."
            )
        gradient = torch.zeros(count, dtype=dtype, device=message.device)
        gradient[indices.long()] = values
        return gradient


def _largest(values: Tensor, k: int) -> Tensor:
    """Return the ascending indices of the k largest magnitudes.

    Among equal magnitudes torch.topk takes any; this function takes the lowest indices.
    """
    if k == len(values):
        return torch.arange(k, device=values.device)
    magnitudes = values.abs().nan_to_num_(nan=math.inf, posinf=math.inf)
    candidates = _candidates(magnitudes, k)
    candidate_magnitudes = magnitudes[candidates]
    threshold = candidate_magnitudes.topk(k, sorted=False).values.min()
    above = candidate_magnitudes > threshold
    ties = candidate_magnitudes == threshold
    return candidates[above | (ties & (ties.cumsum(0) <= k - above.sum()))]


def _candidates(magnitudes: Tensor, k: int) -> Tensor:
    """Return ascending indices that include those of the k largest magnitudes.

    A sample gives a guess of the threshold, a little too low. A search among the few elements above
    it is faster than a search among all. If the guess is too high, all indices are returned.
    """
    sample = magnitudes[::STRIDE]
    above_guess = min(len(sample), k * 5 // (4 * STRIDE) + 16)
    guess = sample.topk(above_guess, sorted=False).values.min()
    candidates = (magnitudes >= guess).nonzero().view(-1)
    if len(candidates) >= k:
        return candidates
    return torch.arange(len(magnitudes), device=magnitudes.device)
