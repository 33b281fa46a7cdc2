"""Numbers of a unit as its forward pass found them, for when it is computed again.

      self.temperature *= 0.99      forward: 1.0 -> 0.99      recompute: 1.0 again, then 0.99 stays

A module may count its forward passes. Computed again in the backward pass, it would count twice and
compute other values than those that were differentiated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

Numbers = dict[tuple[int, str], int | float]
"""Values by the place of a module among those of the unit, and the attribute's name."""
LOOKS = 2
"""Forward passes after which numbers that have not changed are taken for constants."""


class RecomputedNumbers:
    """The numbers that the forward passes of one unit change."""

    def __init__(self) -> None:
        self._looks = LOOKS
        self._changing: set[tuple[int, str]] = set()

    def read(self, unit: nn.Module) -> Numbers:
        """Return the numbers that may change, as they are now."""
        if not self._looks and not self._changing:
            return {}
        tables = [vars(module) for module in unit.modules()]
        if not self._looks:
            return {(index, key): tables[index][key] for index, key in self._changing}
        return {
            (index, key): value
            for index, table in enumerate(tables)
            for key, value in table.items()
            if type(value) in (int, float)
        }

    def learn(self, unit: nn.Module, before: Numbers) -> None:
        """Note which numbers a forward pass has changed."""
        if self._looks:
            now = self.read(unit)
            self._changing |= {at for at, value in before.items() if now.get(at) != value}
            self._looks -= 1

    @contextmanager
    def as_before(self, unit: nn.Module, before: Numbers) -> Iterator[None]:
        """Put numbers back inside of this context to what they were before the forward pass."""
        if not self._changing:
            yield
            return
        tables = [vars(module) for module in unit.modules()]
        now = [(tables[index], key, tables[index][key]) for index, key in self._changing]
        for index, key in self._changing:
            tables[index][key] = before[index, key]
        try:
            yield
        finally:
            for table, key, value in now:
                table[key] = value
