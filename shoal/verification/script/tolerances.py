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
        measured: step -> name of a tensor, as in `StepComparison.errors` -> its own tolerance.
    """

    default: float = EXACT
    measured: Mapping[int, Mapping[str, float]] = field(default_factory=dict)

    def of(self, step: int, name: str) -> float:
        """Return the tolerance of a tensor in a step."""
        return max(self.default, self.measured.get(step, {}).get(name, 0.0))
