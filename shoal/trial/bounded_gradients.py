"""Gradients that do not grow with the loss: something bounds them on their way back.

      h.register_hook(lambda g: g.clamp(-1, 1))      loss x 2^20   gradient / 2^20 is another one
      an autograd.Function, module hooks

What is bounded must have the scale of one device, and no factor for the number of ranks. A bound
of the norm of several rows couples them, which shows where it acts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal.data.seeds import GeneratorStates
from shoal.errors import ShoalError
from shoal.trial.batch_rows import choose_rows, take_rows
from shoal.trial.compare_parts import LossOnRows, Measured
from shoal.trial.loss_verdict import CannotTry
from shoal.trial.untouched import devices_of, leaving_no_trace

LARGE = 2.0**20
"""Factor of a loss at which bounds of gradients act. A power of two adds no rounding."""
ROUNDING = 0.01
TOLERANCE = 1e-4
MAX_ROWS = 16
ERRORS_OF_SCRIPTS = (ValueError, RuntimeError, IndexError, TypeError, ShoalError)
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

    Measures twice, whatever it finds: ranks that divide a model measure together.

    Args:
        measure: measures all rows once more.
        whole: all rows as they were measured.
        tolerance: relative.
    """
    with at_bounds(loss):
        large = measure()
    # What differs without a factor too is random.
    return _leaves_apart(whole, large, tolerance) - _leaves_apart(whole, measure(), tolerance)


def finds_bounds(
    compute_loss: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    num_samples: int,
    models: Sequence[nn.Module],
) -> bool:
    """Return whether something bounds gradients of a loss on their way back.

    Collective over ranks that divide the models and compute the same samples: three passes on at
    most `MAX_ROWS` samples, as in a step. Changes nothing. Gradients of shards are compared.
    """
    rows = choose_rows((args, kwargs), num_samples, MAX_ROWS)
    parameters = [parameter for model in models for parameter in model.parameters()]

    def compute(_: Tensor) -> Any:
        generators.restore()
        taken_args, taken_kwargs = take_rows((args, dict(kwargs)), rows, num_samples)
        return compute_loss(*taken_args, **taken_kwargs)

    loss = LossOnRows(compute, parameters)
    with leaving_no_trace(models, compute_loss, (args, kwargs)) as can_repeat:
        if not can_repeat:
            return False
        generators = GeneratorStates(devices_of(models))
        try:
            with torch.enable_grad():
                whole = loss.whole(rows)
                return bool(bounded_leaves(loss, lambda: loss.whole(rows), whole, TOLERANCE))
        except (CannotTry, *ERRORS_OF_SCRIPTS):  # the step itself says so
            return False


def _leaves_apart(one: Measured, other: Measured, tolerance: float) -> set[int]:
    pairs = list(zip(one.gradients, other.gradients, strict=True))
    # A gradient that is tiny beside the largest one consists of rounding errors.
    floor = ROUNDING * max((float(a.norm()) for a, _ in pairs), default=0.0)
    return {
        index
        for index, (a, b) in enumerate(pairs)
        if (a - b).norm() > tolerance * max(a.norm(), b.norm(), floor)
    }
