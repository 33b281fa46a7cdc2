"""One order of unit runs for all ranks, though each rank knows only the units that it needs itself.

      order      unit 1     unit 2      unit 3      any more?
      rank 0     computes   computes    stands in   no
      rank 1     computes   stands in   computes    no

A rank that needs a unit further on in the order stands in for those before it. This costs no
message. A rank that needs a unit which the order does not have follows it to its end, and asks the
others there. All ranks ask once at the end of every forward pass. Of the units that ranks ask for,
the first one runs next and is appended to the order, until no rank needs any. So the first forward
pass asks for each unit. Later ones ask once, as long as the order contains each rank's own order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

END_OF_STEP = 2**31
"""The number that a rank asks for after its forward pass. Greater than all numbers of runs."""


class UnitOrder:
    """One rank's copy of the order, and its position in it. Equal on all ranks.

    Args: min_over_ranks: returns the minimum of all ranks' numbers. Collective.

    Attributes: runs: numbers of the runs, as the caller chose them.
    """

    def __init__(self, min_over_ranks: Callable[[int], int]) -> None:
        self.min_over_ranks = min_over_ranks
        self.position = 0
        self.runs: list[int] = []

    def begin(self) -> None:
        """Go back to the first run, when a forward pass begins."""
        self.position = 0

    def units_before(self, requested: int) -> Iterator[int]:
        """Yield the runs that come before `requested`, for which this rank must stand in.

        Collective: ranks that reach the end of the order ask each other for the next run.

        Args: requested: number of a run, or END_OF_STEP at the end of a forward pass.
        """
        while self.position < len(self.runs):
            run = self._advance()
            if run == requested:
                return
            yield run
        while (run := self.min_over_ranks(requested)) < END_OF_STEP:
            self.runs.append(run)
            self._advance()
            if run == requested:
                return
            yield run

    def _advance(self) -> int:
        self.position += 1
        return self.runs[self.position - 1]
