"""The relative error that counts as rounding, for each tensor of each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

EXACT = 1e-10
"""For float64: far above the rounding of sums in another order, far below any error."""


@dataclass(frozen=True)
class Tolerances:
    """Tolerances of a comparison.

    Attributes:
        default: of every tensor that has none of its own.
        weights: of weights after a step, where it is another one than that of all others.
        measured: step -> name of a tensor, as in `StepComparison.errors`, or "direction/NAME" of a
            gradient -> its own tolerance.
        floors: step -> name of a tensor -> the smallest tolerance, where it is another one.
    """

    default: float = EXACT
    measured: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    weights: float | None = None
    floors: Mapping[int, Mapping[str, float]] = field(default_factory=dict)

    def of(self, step: int, name: str) -> float:
        """Return the tolerance of a tensor in a step."""
        floor = self.default
        if self.weights is not None and name.startswith("weight/"):
            floor = self.weights
        floor = self.floors.get(step, {}).get(name, floor)
        return max(floor, self.measured.get(step, {}).get(name, 0.0))

    def of_direction(self, step: int, parameter: str) -> float:
        """Return how far the gradient of a parameter may be from a multiple of another's."""
        known = self.measured.get(step, {}).get(f"direction/{parameter}")
        return max(1e-6, 10 * self.default if known is None else known)
