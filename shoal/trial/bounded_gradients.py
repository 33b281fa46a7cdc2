"""Gradients that do not grow with the loss: something bounds them on their way back.

      h.register_hook(lambda g: g.clamp(-1, 1))      loss x 2^20   gradient / 2^20 is another one
      an autograd.Function, module hooks

What is bounded must have the scale of one device, and no factor for the number of ranks. A bound
of the norm of several rows couples them, which shows where it acts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shoal.trial.compare_parts import LossOnRows, Measured

LARGE = 2.0**20
"""Factor of a loss at which bounds of gradients act. A power of two adds no rounding."""
ROUNDING = 0.01
BOUNDED_TOGETHER = (
    "A hook or an autograd.Function bounds gradients of activations by those of several rows, such "
    "as by their norm: bound those of each row by itself, or gradients of parameters."
)
"""The cause of an objection that only shows where bounds act."""


@contextmanager
def at_bounds(loss: LossOnRows, compared: set[int] | None = None) -> Iterator[None]:
    """Measure in this context where all bounds act.

    Args: compared: numbers of the leaves whose gradients count; None for all.
    """
    loss.factor, loss.compared = LARGE, compared
    try:
        yield
    finally:
        loss.factor, loss.compared = 1.0, None


def bounded_leaves(
    loss: LossOnRows, measure: Callable[[], Measured], whole: Measured, tolerance: float
) -> set[int]:
    """Return the numbers of the leaves whose gradients do not grow with the loss.

    Args:
        measure: measures all rows once more.
        whole: all rows as they were measured.
        tolerance: relative.
    """
    with at_bounds(loss):
        large = measure()
    bounded = _leaves_apart(whole, large, tolerance)
    # What differs without a factor too is random.
    return bounded - _leaves_apart(whole, measure(), tolerance) if bounded else bounded


def _leaves_apart(one: Measured, other: Measured, tolerance: float) -> set[int]:
    pairs = list(zip(one.gradients, other.gradients, strict=True))
    # A gradient that is tiny beside the largest one consists of rounding errors.
    floor = ROUNDING * max((float(a.norm()) for a, _ in pairs), default=0.0)
    return {
        index
        for index, (a, b) in enumerate(pairs)
        if (a - b).norm() > tolerance * max(a.norm(), b.norm(), floor)
    }
