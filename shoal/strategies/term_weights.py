"""Combine the terms of a loss into one value to differentiate, and the weight of a micro-batch.

a mean                    x num_samples / global batch size
one sum with a count      divided by the global count after the backward pass
several counts            divided by the global counts before it: one small message
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.errors import UsageError
from shoal.strategies.base import LocalBatch
from shoal.strategies.loss_terms import Term


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
    if batch.loss_weight is not None:
        return CombinedLoss(_mean_of_rank(terms), weight=batch.loss_weight)
    if len(terms) == 1:
        return _single(terms[0], batch)
    if not batch.sizes_known:
        terms = [_with_count(term, batch.num_samples) for term in terms]
    terms = _merged(terms)
    if len(terms) == 1:
        return _single(terms[0], batch)
    _check_undivided(terms, batch)
    counts = [term.count for term in terms if term.count is not None]
    divisors = iter(_global_counts(counts, batch))
    samples = max(batch.num_samples, 1)
    value: Tensor | float = 0.0
    for term in terms:
        if term.count is None:
            value = value + term.value
        else:
            # Its share of the loss, in the unit of a mean over this rank's samples.
            scale = batch.global_batch_size / samples / next(divisors)
            value = value + term.value * scale.to(term.value.dtype)
    assert isinstance(value, Tensor)
    return CombinedLoss(value)


def _check_undivided(terms: Sequence[Term], batch: LocalBatch) -> None:
    """Raise UsageError if counts are needed of micro-batches that are still to come."""
    if not batch.is_last_microbatch or batch.previous_totals is not None:
        raise UsageError(
            f"compute_loss returned a loss of {len(terms)} terms with different counts, and the "
            "batch is divided into micro-batches: the counts of all of them are needed before the "
            "first backward pass. Use accumulate=1, or one counted(sum, count) for the whole loss."
        )


def _global_counts(counts: Sequence[Tensor], batch: LocalBatch) -> Sequence[Tensor]:
    """Return each count summed over ranks, 1 in the place of 0. Collective over the data axis."""
    if batch.num_samples == 0:  # a stand-in adds nothing to the counts
        counts = [torch.zeros_like(count) for count in counts]
    totals = torch.stack([count.detach().double() for count in counts])
    if batch.sum_counts is not None:
        totals = batch.sum_counts(totals)
    return torch.where(totals == 0, torch.ones_like(totals), totals).unbind()


def _single(term: Term, batch: LocalBatch) -> CombinedLoss:
    """Return the loss of one term."""
    if term.count is not None:
        return CombinedLoss(term.value, is_sum=True, divisor=term.count)
    if batch.sizes_known:
        return CombinedLoss(term.value)
    return CombinedLoss(term.value * batch.num_samples, is_sum=True)


def _mean_of_rank(terms: Sequence[Term]) -> Tensor:
    """Return the loss of this rank alone."""
    value: Tensor | float = 0.0
    for term in terms:
        divided = term.value if term.count is None else term.value / term.count.clamp(min=1)
        value = value + divided
    assert isinstance(value, Tensor)
    return value


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
