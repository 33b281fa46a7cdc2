"""Terms of a loss: a mean, a sum with a count, sums of these; and more values beside it.

return loss                                     mean over this rank's samples
return counted(sum, count)                      samples weigh differently
return counted(a, n) + 0.1 * counted(b, m)      terms with counts of their own
return loss, {"logits": logits}                 more values, which come back
return loss, {"hits": summed(hits)}             ... summed over all ranks
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.errors import UsageError


@dataclass(slots=True)
class Term:
    """One addend of a loss."""

    value: Tensor
    """0-dimensional: a sum if there is a count, else the mean over this rank's samples."""
    count: Tensor | None
    """0-dimensional and without a gradient: the divisor, summed over all ranks. None: a mean."""


@dataclass(frozen=True)
class Counted:
    """A loss whose addends are divided by counts over the whole global batch.

    `+` adds another loss, `*` and `/` scale by a number. `counted` makes it.
    """

    terms: tuple[Term, ...]

    def __add__(self, other: Any) -> Counted:
        if isinstance(other, Counted):
            return Counted(self.terms + other.terms)
        if isinstance(other, Tensor):
            return Counted((*self.terms, Term(other, None)))
        if isinstance(other, int | float) and other == 0:  # sum() begins with 0
            return self
        raise UsageError(f"a counted loss and a {type(other).__name__} cannot be added.")

    __radd__ = __add__

    def __mul__(self, factor: Any) -> Counted:
        _check_factor(factor)
        return Counted(tuple(Term(term.value * factor, term.count) for term in self.terms))

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Counted:
        _check_factor(divisor)
        return Counted(tuple(Term(term.value / divisor, term.count) for term in self.terms))

    def __sub__(self, other: Any) -> Counted:
        return self.__add__(-1.0 * other)


def _check_factor(factor: Any) -> None:
    if not isinstance(factor, int | float | Tensor):
        raise UsageError(f"a counted loss cannot be scaled by a {type(factor).__name__}.")


def counted(loss_sum: Tensor, count: Tensor | float) -> Counted:
    """Return the loss `loss_sum / count`, with both summed over all ranks before the division.

    Args:
        loss_sum: scalar, the sum over this rank's samples, tokens or boxes.
        count: their number on this rank, which may be 0.

    Raises: UsageError: `loss_sum` is no scalar, or the count needs a gradient.
    """
    if not isinstance(loss_sum, Tensor) or loss_sum.dim() != 0:
        form = tuple(loss_sum.shape) if isinstance(loss_sum, Tensor) else type(loss_sum).__name__
        raise UsageError(f"counted(sum, count): the sum must be a scalar tensor, and is {form}.")
    if isinstance(count, Tensor):
        if count.requires_grad or count.numel() != 1:
            raise UsageError(
                "counted(sum, count): the count must be one number without a gradient: a number "
                "of samples, tokens or weights."
            )
        # The object stays the same where it can: terms with the same count become one term.
        number = count if count.dim() == 0 else count.reshape(())
    else:
        if not isinstance(count, int | float) or not 0 <= count < math.inf:
            raise UsageError(
                f"counted(sum, count): the count {count!r} is no number from 0 on, of samples, "
                "tokens or weights."
            )
        number = loss_sum.new_full((), float(count))
    return Counted((Term(loss_sum, number),))


@dataclass(frozen=True)
class Summed:
    """A value that comes back as its sum over all ranks. `summed` makes it."""

    value: Tensor


def summed(value: Tensor | float) -> Summed:
    """Mark a value of a step that is to come back summed over all ranks.

    Args: value: 0- or 1-dimensional, a sum over this rank's samples. It travels with the gradients.
    """
    if not isinstance(value, Tensor | int | float):
        raise UsageError(f"summed(...) takes a number or a tensor; it is a {type(value).__name__}.")
    tensor = torch.as_tensor(value).detach()
    if tensor.dim() > 1:
        raise UsageError(
            f"summed(...) takes a number or a 1-dimensional tensor; its shape is "
            f"{tuple(tensor.shape)}."
        )
    return Summed(tensor)


def split_result(result: Any) -> tuple[tuple[Term, ...], Any]:
    """Return the terms of a loss and the other values that `compute_loss` has returned.

    Raises: UsageError: it returned something else.
    """
    loss, extra = result, None
    if isinstance(result, tuple):
        if len(result) != 2:
            raise UsageError(
                f"compute_loss returned {len(result)} values; it must return loss, or (loss, more) "
                "with everything else in `more`, a dict for example."
            )
        loss, extra = result
        is_number = isinstance(extra, (int, float)) or (
            isinstance(extra, Tensor) and extra.dim() == 0
        )
        if isinstance(loss, Tensor) and is_number:
            raise UsageError(
                "compute_loss returned a pair of numbers. For a sum and its count return "
                "shoal.counted(sum, count); to get a second number back, name it: "
                'return loss, {"name": number}.'
            )
    if isinstance(loss, Counted):
        return loss.terms, extra
    if not isinstance(loss, Tensor):
        raise UsageError(
            f"compute_loss returned a {type(loss).__name__}; it must return a scalar tensor, the "
            "mean over its batch, or shoal.counted(sum, count)."
        )
    if loss.dim() != 0:
        raise UsageError(
            f"compute_loss returned a tensor of shape {tuple(loss.shape)}; it must return the mean "
            "over its batch (a scalar), or shoal.counted(sum, count)."
        )
    if not loss.is_floating_point():
        raise UsageError(
            f"compute_loss returned a number of {str(loss.dtype).removeprefix('torch.')}; it must "
            "return the mean over its batch, a real number with a gradient."
        )
    return (Term(loss, None),), extra
