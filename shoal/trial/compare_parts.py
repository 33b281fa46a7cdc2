"""Loss and gradients of a batch, compared with those of its parts.

    rows       0 1 2 3 4 5 6 7 8 9 10 11       the whole, W
    parts      1 row | a third | the rest      A, B, C     at random; where they differ, two parts:
                                                           a third, 1 row, a half | the rest

    mean       L(W) = n_A/n L(A) + n_B/n L(B) + ..., and the same for the gradients
    sum        L(W) = L(A) + L(B) + ...
    counted    sums and counts add up

Gradients tell more than losses: at initialisation all of a classifier's losses are log C, however
they are weighted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.strategies.loss_terms import Term, split_result, zero_of_nothing
from shoal.trial.loss_verdict import CannotTry

SKETCH_SIZE = 4096
"""Numbers of a piece of a gradient. Sums of pieces stand for a large one."""
SKETCHES, SKETCHED_FROM = 4, 16
"""Sums, in place of more pieces. A single one of a gradient of low rank may be 0 by chance."""

LOSS_WEIGHT = 0.1
"""Weight of a difference of losses. A loss may cancel out where its gradient does not, as the
difference of two means does.
"""


class Measured(NamedTuple):
    """One pass over some rows."""

    num_rows: int
    loss: float
    gradients: list[Tensor]
    counts: tuple[float, ...]


class SplitError(NamedTuple):
    """Relative distance of the parts of one split from the whole, by the rule that is assumed."""

    sizes: tuple[int, ...]
    mean: float
    sum: float


class LossOnRows:
    """The loss of any rows of a batch with its gradients, all terms added up.

    Sums are divided by the counts of the whole, so that what parts have to add up to is the loss
    of the whole.

    Args:
        compute: (rows) -> the result of the user's function on these rows.
        leaves: tensors whose gradients are compared.
    """

    def __init__(self, compute: Callable[[Tensor], Any], leaves: Sequence[Tensor]) -> None:
        self._compute = compute
        self._leaves = [leaf for leaf in leaves if leaf.requires_grad]
        self.counts: tuple[float, ...] = ()
        pieces = max((leaf.numel() // SKETCH_SIZE for leaf in self._leaves), default=0)
        generator = torch.Generator().manual_seed(0)
        self._signs = torch.randint(0, 2, (SKETCHES, pieces), generator=generator) * 2 - 1

    def whole(self, rows: Tensor) -> Measured:
        """Measure the whole. Must come first.

        Raises: CannotTry: the loss is not finite or has no gradient.
        """
        terms, _ = split_result(self._compute(rows))
        self.counts = tuple(float(t.count) for t in terms if t.count is not None)
        measured = self._measured(terms, rows, 1.0)
        finite = math.isfinite(measured.loss) and all(
            bool(gradient.isfinite().all()) for gradient in measured.gradients
        )
        if not finite:
            raise CannotTry("a loss or a gradient that is not finite")
        return measured

    def part(self, rows: Tensor, num_rows: int) -> Measured:
        """Measure a part; means count by the share of its rows in `num_rows`."""
        terms, _ = split_result(self._compute(rows))
        return self._measured(terms, rows, len(rows) / num_rows)

    def is_rounding(self, measured: Measured) -> bool:
        """Return True if gradients are as small beside their leaves as float32 rounds them.

        So they are where a student begins as a copy of its teacher: nothing can be compared.
        """
        gradients = math.sqrt(sum(float(g.double().square().sum()) for g in measured.gradients))
        leaves = math.sqrt(
            sum(float(leaf.detach().double().square().sum()) for leaf in self._leaves)
        )
        return gradients <= torch.finfo(torch.float32).eps * leaves

    def _measured(self, terms: tuple[Term, ...], rows: Tensor, share: float) -> Measured:
        counts = tuple(float(term.count) for term in terms if term.count is not None)
        if len(counts) != len(self.counts):
            raise CannotTry("another number of counted terms on fewer samples")
        divisors = iter(self.counts)
        total: Any = 0.0
        for term in terms:
            factor = share if term.count is None else 1.0 / (next(divisors) or 1.0)
            total = total + zero_of_nothing(term).value * factor
        if not self._leaves or not total.requires_grad:
            raise CannotTry("a loss that no parameter has a part in")
        gradients = torch.autograd.grad(total, self._leaves, allow_unused=True)
        sketches = [
            _sketch(torch.zeros_like(leaf) if gradient is None else gradient, self._signs)
            for leaf, gradient in zip(self._leaves, gradients, strict=True)
        ]
        return Measured(len(rows), float(total.detach().double()), sketches, counts)


def _sketch(gradient: Tensor, signs: Tensor) -> Tensor:
    """Return a gradient, or random sums of a large one: linear, and as long on the average.

    Those of four passes are held at once, so a large model has no memory for whole gradients.

    Args: signs: 1 and -1 in a few rows, as long as the largest gradient has pieces.
    """
    gradient = gradient.detach()
    if gradient.is_sparse:
        gradient = gradient.coalesce().to_dense()
    flat = gradient.flatten()
    pieces = flat.numel() // SKETCH_SIZE
    if pieces <= SKETCHED_FROM:
        return flat
    flat = flat.float() if flat.dtype.itemsize < 4 else flat
    whole, rest = flat.split([pieces * SKETCH_SIZE, flat.numel() % SKETCH_SIZE])
    sums = signs[:, :pieces].to(flat) @ whole.view(pieces, SKETCH_SIZE)
    return torch.cat((sums.flatten() / math.sqrt(len(signs)), rest))


def distance(whole: Measured, parts: Sequence[Measured]) -> SplitError:
    """Return how far the parts of a split are from the whole: as a mean, and as a sum."""
    shares = [part.num_rows / whole.num_rows for part in parts]
    # Parts are measured as shares of a mean already; a sum takes that factor away again.
    as_sum = [1.0 / share for share in shares]
    counts = max(
        (
            _relative(abs(count - sum(part.counts[index] for part in parts)), abs(count))
            for index, count in enumerate(whole.counts)
        ),
        default=0.0,
    )
    mean = max(_error(whole, parts, [1.0] * len(parts)), counts)
    total = 1.0 if whole.counts else _error(whole, parts, as_sum)
    return SplitError(tuple(part.num_rows for part in parts), mean, total)


def distance_of_repeat(whole: Measured, again: Measured) -> float:
    """Return how far a second measurement of all rows is from the first."""
    return _error(whole, [again], [1.0])


def _error(whole: Measured, parts: Sequence[Measured], factors: Sequence[float]) -> float:
    pairs = list(zip(parts, factors, strict=True))
    loss = _relative(
        abs(whole.loss - sum(part.loss * factor for part, factor in pairs)),
        sum(abs(part.loss * factor) for part, factor in pairs),
    )
    squares, lengths = 0.0, [0.0] * len(parts)
    for index, of_whole in enumerate(whole.gradients):
        rest = of_whole.to(torch.float64, copy=True)
        for number, (part, factor) in enumerate(pairs):
            scaled = part.gradients[index].double() * factor
            rest -= scaled
            lengths[number] += float(scaled.square().sum())
        squares += float(rest.square().sum())
    of_gradients = _relative(math.sqrt(squares), sum(math.sqrt(length) for length in lengths))
    return max(loss * LOSS_WEIGHT, of_gradients)


def _relative(error: float, size: float) -> float:
    """Return error / size; 1.0 where it is no number, so that a NaN counts as a difference.

    `max` of numbers with a NaN among them depends on their order.
    """
    if error == 0.0:
        return 0.0
    ratio = error / size if size else 1.0
    return ratio if math.isfinite(ratio) else 1.0
