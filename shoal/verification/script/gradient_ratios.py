"""Ratios of gradients: they tell a wrong scale from a missing sum, and from wrong weights.

g = gradient on one process, h = gradient on many ranks, of one parameter
factor   <h, g> / <g, g>             1/2: it was divided once too often, by 2 ranks
rest     |h - factor g| / |h|        0: h is a multiple of g; else another direction
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class GradientRatio(NamedTuple):
    """The gradient of a parameter on many ranks as a multiple of that on one process."""

    factor: float
    rest: float
    size: float
    """Norm of the gradient on one process."""

    @property
    def distance(self) -> float:
        """How far it is from being the same gradient."""
        return max(self.rest, abs(self.factor - 1))

    def is_multiple(self, tolerance: float) -> bool:
        """Return True if both have one direction."""
        return self.rest <= tolerance


def ratio(expected: Tensor, given: Tensor) -> GradientRatio:
    """Return the ratio of two tensors of one shape."""
    g, h = expected.double().flatten(), given.double().flatten()
    square = float(g @ g)
    if square == 0.0:
        return GradientRatio(1.0, 0.0 if not h.any() else 1.0, 0.0)
    factor = float(h @ g) / square
    size = float(h.norm())
    rest = float((h - factor * g).norm()) / size if size else 0.0
    return GradientRatio(factor, rest, square**0.5)


def ratios(expected: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> dict[str, GradientRatio]:
    """Return the ratios of all tensors that both have in one shape.

    Tensors that are zero but for rounding have no direction, and are left out.
    """
    found = {
        name: ratio(tensor, given[name])
        for name, tensor in expected.items()
        if name in given and given[name].shape == tensor.shape
    }
    largest = max((value.size for value in found.values()), default=0.0)
    return {name: value for name, value in found.items() if value.size > 1e-8 * largest}


def common_factor(
    values: Mapping[str, GradientRatio], tolerance: Callable[[str], float]
) -> float | None:
    """Return the one factor of all gradients; None where they have several, or no multiple.

    Args: tolerance: of a gradient, by its name.
    """
    allowed = {name: tolerance(name) for name in values}
    if not values or not all(value.is_multiple(allowed[name]) for name, value in values.items()):
        return None
    surest = min(allowed, key=lambda name: allowed[name])
    middle = values[surest].factor
    size = max(abs(middle), 1e-12)
    is_one = all(
        abs(value.factor - middle) <= (allowed[name] + allowed[surest]) * size
        for name, value in values.items()
    )
    return middle if is_one else None


def row_ratios(expected: Tensor, given: Tensor) -> list[GradientRatio]:
    """Return the ratios of the rows of a gradient of outputs; rows without any are left out.

    Rows that have one on many ranks alone have an infinite factor. Empty where the shapes differ.
    """
    if expected.dim() < 1 or expected.shape != given.shape:
        return []
    rows = [(g, h) for g, h in zip(expected, given, strict=True) if g.any() or h.any()]
    return [ratio(g, h) if g.any() else GradientRatio(math.inf, 0.0, 0.0) for g, h in rows]


def row_factors(expected: Tensor, given: Tensor, tolerance: float) -> list[float] | None:
    """Return a factor for each row of a gradient of outputs; None where rows are no multiples."""
    rows = row_ratios(expected, given)
    return [row.factor for row in rows] if all(r.is_multiple(tolerance) for r in rows) else None


def in_words(factor: float, ranks: int) -> str:
    """Return a factor as people write it: "2", "1/2 (the number of ranks)", "0.7071"."""
    hint = ""
    for number in (ranks, ranks * ranks):
        if abs(factor - number) < 1e-6 * number or abs(factor * number - 1) < 1e-6:
            hint = " ranks" if number == ranks else " ranks, squared"
            break
    for bottom in range(1, 17):
        top = factor * bottom
        if abs(top - round(top)) < 1e-6 * max(1.0, abs(top)) and round(top) != 0:
            text = f"{round(top)}" if bottom == 1 else f"{round(top)}/{bottom}"
            return f"{text} (there are {ranks} ranks)" if hint else text
    return f"{factor:.4g}"


def is_sum_of(
    given: Mapping[str, Tensor],
    parts: Sequence[Mapping[str, Tensor]],
    tolerance: Callable[[str], float],
) -> bool:
    """Return True if all gradients are the sums of those of several steps."""
    names = [name for name in given if all(name in part for part in parts)]
    if not names:
        return False
    for name in names:
        expected = torch.stack([part[name].double() for part in parts]).sum(0)
        if ratio(expected, given[name]).distance > tolerance(name):
            return False
    return True
