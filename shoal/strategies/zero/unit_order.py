"""The plan: one order of runs for all ranks, though each knows only what it wants itself.

      plan       unit 1     unit 2      unit 3      any more?
      rank 0     wants      wants       stands in   no
      rank 1     wants      stands in   wants       no

A rank that wants a unit further on in the plan stands in for those before it, and asks nobody. One
that wants a unit which is not there follows the plan to its end and asks; all others listen there,
once in every forward pass. The first of the units that are wanted is served and added to the plan,
until nobody wants any. So the first forward pass asks for each unit, and later ones ask once, as
long as every rank's order is part of the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator

END_OF_STEP = 2**31
"""What a rank wants after its forward pass: nothing. Greater than all that can be wanted."""


class UnitOrder:
    """One rank's copy of the plan, and where in it the rank is. Runs are numbers that the user
    gives them.

    Args: least: this rank's number -> the smallest of all ranks' numbers. Collective.
    """

    def __init__(self, least: Callable[[int], int]) -> None:
        self.least, self.position = least, 0
        self.runs: list[int] = []

    def begin(self) -> None:
        """A forward pass begins."""
        self.position = 0

    def units_before(self, wanted: int) -> Iterator[int]:
        """The runs to stand in for until it is the turn of `wanted`; DONE at the end of a
        forward pass. Collective.
        """
        while self.position < len(self.runs):
            run = self._advance()
            if run == wanted:
                return
            yield run
        while (run := self.least(wanted)) < END_OF_STEP:
            self.runs.append(run)
            self._advance()
            if run == wanted:
                return
            yield run

    def _advance(self) -> int:
        self.position += 1
        return self.runs[self.position - 1]
