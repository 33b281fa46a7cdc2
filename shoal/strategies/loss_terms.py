"""Terms of a loss: a mean, a sum with a count, sums of these; and more values beside it.

return loss                                     mean over this rank's samples
return counted(sum, count)                      samples weigh differently
return counted(a, n) + 0.1 * counted(b, m)      terms with counts of their own
return loss, {"logits": logits}                 more values, which come back
return loss, {"hits": summed(hits)}             ... summed over all ranks

`combine_terms` makes one value of them to differentiate, with the weight of a micro-batch:

a mean                    x num_samples / global batch size
one sum with a count      divided by the global count after the backward pass
several counts            divided by the global counts before it: one small message

Values beside the loss are collected from micro-batches, and given back for this rank's samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.data.tree_map import tree_map
from shoal.errors import UsageError
from shoal.platform.tensors import tensor_on
from shoal.strategies.base import MAX_SUMMED, NONFINITE, SUMMED, Extra, LocalBatch

LOSS_AS_FUNCTION = "run.forward_backward(lambda x, y: loss_fn(model(x), y), x, y)"
LOOP_IN_PIPELINE = (
    "run.backward: a stage of a pipeline has some layers, and computes one micro-batch after the "
    f"other, so the loss must be a function of the batch: loss = {LOSS_AS_FUNCTION}."
)
LOOP_IN_SERVERS = (
    "run.microbatches: parameter servers get the gradients of a step in one message. Give the loss "
    "as a function, which adds up micro-batches: run.forward_backward(compute_loss, *batch)."
)


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

    `+` and `-` take another loss, `*` and `/` a number. `counted` makes it.
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

    def __neg__(self) -> Counted:
        return Counted(tuple(Term(-term.value, term.count) for term in self.terms))

    def __sub__(self, other: Any) -> Counted:
        return self.__add__(-1.0 * other)

    def __rsub__(self, other: Any) -> Counted:
        return self.__neg__().__add__(other)


def _check_factor(factor: Any) -> None:
    if not isinstance(factor, int | float | Tensor):
        raise UsageError(f"a counted loss cannot be scaled by a {type(factor).__name__}.")


def counted(loss_sum: Tensor, count: Tensor | float) -> Counted:
    """Return the loss `loss_sum / count`, with both summed over all ranks before the division.

    Args:
        loss_sum: scalar, the sum over this rank's samples, tokens or boxes.
        count: their number on this rank. If it is 0, a sum that is NaN counts as 0.

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
    if isinstance(loss, Tensor) and loss.dim() == 0 and loss.is_floating_point():
        return (Term(loss, None),), extra
    found = type(loss).__name__
    if isinstance(loss, Tensor):
        found = f"tensor of shape {tuple(loss.shape)} and of {loss.dtype}"
    raise UsageError(
        f"compute_loss returned a {found}; it must return the mean over its batch, a scalar tensor "
        "of real numbers, or shoal.counted(sum, count)."
    )


class CombinedLoss(NamedTuple):
    """The terms of a loss as one value.

    Attributes:
        value: scalar. A sum that is still to be divided by the global count; or a mean over the
            samples of this micro-batch, or what counts as such: the sum over all ranks of
            value x weight x num_samples / global_batch_size is the loss.
        is_sum: `value` is a sum.
        divisor: the count of the sum, a scalar; None if it is the number of samples.
        weight: of a sample.
    """

    value: Tensor
    is_sum: bool = False
    divisor: Tensor | None = None
    weight: float = 1.0


def combine_terms(terms: Sequence[Term], batch: LocalBatch) -> CombinedLoss:
    """Return the terms as one value. Collective over the data axis if they have several counts.

    Raises: UsageError: several counts, and the batch is divided into micro-batches.
    """
    terms = [zero_of_nothing(term) for term in terms]
    if batch.step.loss_weight is not None:
        means = [t.value if t.count is None else t.value / t.count.clamp(min=1) for t in terms]
        return CombinedLoss(reduce(add, means), weight=batch.step.loss_weight)
    if len(terms) == 1:
        return _single(terms[0], batch)
    if not batch.step.sizes_known:
        terms = [_with_count(term, batch.num_samples) for term in terms]
    terms = _merged(terms)
    if len(terms) == 1:
        return _single(terms[0], batch)
    if not batch.is_last_microbatch or batch.previous_totals is not None:
        raise UsageError(
            f"compute_loss returned a loss of {len(terms)} terms with different counts, and the "
            "batch is divided into micro-batches: the counts of all of them are needed before the "
            "first backward pass. Use accumulate=1, and microbatches=1 in a pipeline, or one "
            "counted(sum, count) for the whole loss."
        )
    counts = [term.count for term in terms if term.count is not None]
    # Shares of the loss, in the unit of a mean over this rank's samples.
    factor = batch.step.global_batch_size / max(batch.num_samples, 1)
    scales = iter([factor / divisor for divisor in _global_counts(counts, batch)])
    shares = [
        t.value if t.count is None else t.value * next(scales).to(t.value.dtype) for t in terms
    ]
    return CombinedLoss(reduce(add, shares))


def zero_of_nothing(term: Term) -> Term:
    """Return a term that is 0 where it counts nothing and is NaN: a mean of no token, times 0."""
    if term.count is None:
        return term
    is_mean_of_none = (term.count == 0) & term.value.isnan()
    return Term(torch.where(is_mean_of_none, 0.0, term.value), term.count)


def _global_counts(counts: Sequence[Tensor], batch: LocalBatch) -> Sequence[Tensor]:
    """Return each count summed over ranks, 1 in the place of 0. Collective over the data axis."""
    if batch.num_samples == 0:  # a stand-in adds nothing to the counts
        counts = [torch.zeros_like(count) for count in counts]
    totals = torch.stack([count.detach().double() for count in counts])
    if batch.step.sum_counts is not None:
        totals = batch.step.sum_counts(totals)
    return torch.where(totals == 0, torch.ones_like(totals), totals).unbind()


def _single(term: Term, batch: LocalBatch) -> CombinedLoss:
    """Return the loss of one term."""
    if term.count is not None:
        return CombinedLoss(term.value, is_sum=True, divisor=term.count)
    if batch.step.sizes_known:
        return CombinedLoss(term.value)
    return CombinedLoss(term.value * batch.num_samples, is_sum=True)


def _with_count(term: Term, num_samples: int) -> Term:
    """Return a mean as the sum over its samples, with their number."""
    if term.count is not None:
        return term
    return Term(term.value * num_samples, term.value.new_full((), num_samples).detach())


def _merged(terms: Sequence[Term]) -> list[Term]:
    """Add up the means, and the sums that have the same count.

    Counts are the same if they are one tensor. Equal values do not suffice: ranks must decide
    alike.
    """
    merged: list[Term] = []
    for term in terms:
        for index, other in enumerate(merged):
            if term.count is other.count:
                merged[index] = Term(other.value + term.value, other.count)
                break
        else:
            merged.append(term)
    return merged


def detach(value: Any) -> Any:
    """Return a nest with its tensors detached."""
    if isinstance(value, Tensor):
        return value.detach()
    return tree_map(value, detach)


def add_summed(totals: Tensor, extra: Any, weight: float) -> None:
    """Add the summed values of a nest to the totals of a step, in order.

    Args: totals: (TOTALS_LENGTH,). weight: a factor, as of all totals.

    Raises: UsageError: there are too many.
    """
    position = SUMMED
    for marked in _leaves(extra):
        if not isinstance(marked, Summed):
            continue
        values = marked.value.reshape(-1)
        if position + len(values) > NONFINITE:
            raise UsageError(
                f"compute_loss returned more than {MAX_SUMMED} summed numbers; a step carries "
                f"{MAX_SUMMED}."
            )
        totals[position : position + len(values)] += (values * weight).to(totals)
        position += len(values)


def has_own(value: Any) -> bool:
    """Return True if a nest has a tensor that is not to be summed over ranks."""
    return any(isinstance(leaf, Tensor) for leaf in _leaves(value))


def join(extras: Sequence[Extra], totals: Tensor) -> Any:
    """Return the values of all micro-batches of a step as one nest.

    Tensors with a row for each sample are concatenated; numbers and scalars are averaged over
    samples; summed values are those of all ranks.

    Args: totals: (TOTALS_LENGTH,), summed over all ranks.

    Raises: UsageError: a value of several micro-batches that cannot be joined.
    """
    numbers = iter(totals[SUMMED:NONFINITE].unbind())
    return _join([extra.num_samples for extra in extras], [e.value for e in extras], numbers)


def _join(samples: list[int], values: list[Any], numbers: Iterator[Tensor]) -> Any:
    first = values[0]
    if isinstance(first, Summed):
        taken = [next(numbers) for _ in range(first.value.numel())]
        return torch.stack(taken).reshape(first.value.shape).clone()
    if isinstance(first, Tensor):
        return _join_tensors(samples, values)
    if isinstance(first, Mapping):
        return {key: _join(samples, [v[key] for v in values], numbers) for key in first}
    if isinstance(first, (tuple, list)):
        items = [_join(samples, [*column], numbers) for column in zip(*values, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    if len(values) == 1 or all(value == first for value in values):
        return first
    if isinstance(first, (int, float)):
        total = max(sum(samples), 1)
        return sum(n * value for n, value in zip(samples, values, strict=True)) / total
    raise UsageError(
        f"compute_loss returned a {type(first).__name__} beside the loss, and a step has "
        f"{len(values)} micro-batches: only tensors with a row for each sample, and numbers, can "
        "be joined. Return these."
    )


def _join_tensors(samples: list[int], values: list[Tensor]) -> Tensor:
    first = values[0]
    if first.dim() == 0:
        if len(values) == 1:
            return first
        weights = tensor_on(samples, torch.float64, first.device)
        stacked = torch.stack(values).double()
        mean = (stacked * weights).sum() / weights.sum().clamp(min=1)
        return mean.to(first.dtype if first.is_floating_point() else torch.get_default_dtype())
    by_rows = all(v.shape[0] == max(n, 1) for n, v in zip(samples, values, strict=True))
    if by_rows:
        return torch.cat([value[:n] for n, value in zip(samples, values, strict=True)])
    if len(values) == 1:
        return first
    raise UsageError(
        f"compute_loss returned a tensor of shape {tuple(first.shape)} beside the loss, for a "
        f"micro-batch of {samples[0]} samples: those of several micro-batches cannot be joined. "
        "Return a row for each sample."
    )


def _leaves(value: Any) -> Iterator[Any]:
    """Yield what tuples, lists and mappings hold, in order."""
    if not isinstance(value, (Mapping, tuple, list)):
        yield value
        return
    for item in value.values() if isinstance(value, Mapping) else value:
        yield from _leaves(item)
