"""Loss and gradients of a batch, compared with those of its parts.

    rows       0 1 2 3 4 5 6 7 8 9 10 11       the whole, W
    parts      a third at random | the rest    A, B        also 1 row | the rest, and two halves

    mean       L(W) = n_A/n L(A) + n_B/n L(B), and the same for the gradients
    sum        L(W) = L(A) + L(B)
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

from shoal.strategies.loss_terms import Term, split_result
from shoal.trial.loss_verdict import CannotTry

SKETCH_SIZE = 4096
"""Numbers that stand for the gradient of a parameter with more than 2**20 of them."""


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
        gradients = math.sqrt(sum(float(g.square().sum()) for g in measured.gradients))
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
            total = total + term.value * factor
        if not self._leaves or not total.requires_grad:
            raise CannotTry("a loss that no parameter has a part in")
        gradients = torch.autograd.grad(total, self._leaves, allow_unused=True)
        sketches = [
            _sketch(torch.zeros_like(leaf) if gradient is None else gradient, index)
            for index, (leaf, gradient) in enumerate(zip(self._leaves, gradients, strict=True))
        ]
        return Measured(len(rows), float(total.detach().double()), sketches, counts)


def _sketch(gradient: Tensor, index: int) -> Tensor:
    """Return a gradient, or random sums of a large one: linear, and as long on the average."""
    gradient = gradient.detach()
    if gradient.is_sparse:
        gradient = gradient.coalesce().to_dense()
    flat = gradient.flatten()
    if flat.numel() <= 1 << 20:
        return flat.double()
    generator = torch.Generator().manual_seed(index)
    sums = flat.new_zeros(SKETCH_SIZE, dtype=torch.float64)
    for piece in flat.split(SKETCH_SIZE << 8):
        rows = torch.nn.functional.pad(piece, (0, -piece.numel() % SKETCH_SIZE))
        signs = torch.randint(0, 2, rows.shape, generator=generator, dtype=torch.int8) * 2 - 1
        sums += (rows.double() * signs.to(rows.device)).view(-1, SKETCH_SIZE).sum(0)
    return sums


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
        rest = of_whole.clone()
        for number, (part, factor) in enumerate(pairs):
            scaled = part.gradients[index] * factor
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
