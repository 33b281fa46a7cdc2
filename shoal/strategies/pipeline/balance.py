"""The choice of the cuts: stages take equally long, and little is sent between them.

      costs     1   1   4   1   1   1        seconds, or numbers of parameters, of each step
      places      1   2   3   4   5          where the model can be cut
      2 stages            │                  cut before step 3: 6 | 3; or before step 2: 2 | 7

Dynamic programming over (number of stages, place): O(stages * places^2).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

SLACK = 1.05
"""The longest stage may be 5 % longer than in the best partition if less is sent that way."""

Value = tuple[float, float, float]
"""Minimised in this order: separations; longest stage or bytes sent; sum of squared costs."""
UNREACHED: Value = (float("inf"), float("inf"), float("inf"))


class _BalanceProblem(NamedTuple):
    """The input of the dynamic programming.

    Attributes:
        prefix: prefix[i] is the cost of all steps before step i.
        crossing, separations: for each place, as in `balanced`.
        boundaries: 0, the places, the number of steps.
    """

    prefix: Sequence[float]
    crossing: Sequence[float]
    separations: Sequence[int]
    boundaries: Sequence[int]
    num_stages: int


def balanced(
    costs: Sequence[float],
    crossing: Sequence[float],
    places: Sequence[int],
    num_stages: int,
    separations: Sequence[int] | None = None,
) -> list[int]:
    """Return the first steps of stages 1, 2, ...

    First find the shortest possible longest stage. Then, among partitions whose longest stage is at
    most SLACK times as long, take the one that sends least.

    Args:
        costs: of each step, in any unit.
        crossing: for each place, the amount that a cut there sends; any unit.
        places: steps that may begin a stage, ascending.
        num_stages: at most len(places) + 1.
        separations: for each place, how many colocations a cut there would separate. Fewest
            separations come first, whatever that does to the length of stages.

    Returns: num_stages - 1 of `places`, ascending.
    """
    assert 0 < num_stages <= len(places) + 1
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)
    boundaries = [0, *places, len(costs)]
    problem = _BalanceProblem(
        prefix, crossing, separations or [0] * len(crossing), boundaries, num_stages
    )
    unsent = problem._replace(crossing=[0.0] * len(crossing))
    shortest = _partition(unsent, float("inf"), minimize_longest=True)
    longest = max(
        prefix[stop] - prefix[start] for start, stop in pairwise([0, *shortest, len(costs)])
    )
    # The tiny addend: with costs of zero, no stage would be below a limit of zero.
    return _partition(problem, longest * SLACK + 1e-30, minimize_longest=False)


def _partition(problem: _BalanceProblem, limit: float, minimize_longest: bool) -> list[int]:
    """Return the first steps of stages 1, 2, ... of the best partition.

    Minimise, in this order: (1) separations; (2) the cost of the longest stage, or else the amount
    sent, where no stage costs more than `limit`; (3) the sum of squared stage costs, so that the
    other stages are even too.
    """
    boundaries = problem.boundaries
    count = len(boundaries)
    best: list[list[Value]] = [[UNREACHED] * count for _ in range(problem.num_stages + 1)]
    previous: list[list[int]] = [[0] * count for _ in range(problem.num_stages + 1)]
    best[0][0] = (0.0, 0.0, 0.0)
    for stage in range(1, problem.num_stages + 1):
        for right in range(stage, count):
            best[stage][right], previous[stage][right] = _best_last_stage(
                problem, best[stage - 1], stage, right, limit, minimize_longest
            )
    cuts = []
    index = count - 1
    for stage in range(problem.num_stages, 1, -1):
        index = previous[stage][index]
        cuts.append(boundaries[index])
    return cuts[::-1]


def _best_last_stage(
    problem: _BalanceProblem,
    before: Sequence[Value],
    stage: int,
    right: int,
    limit: float,
    minimize_longest: bool,
) -> tuple[Value, int]:
    """Choose where stage number `stage`, counted from 1, begins if it ends at boundary `right`.

    Args: before: for each boundary, the value of the best partition with one stage less that ends
        there.

    Returns: the best value, and the boundary at which the stage begins.
    """
    stop = problem.boundaries[right]
    ends_with_cut = right < len(problem.boundaries) - 1
    sent = problem.crossing[stop] if ends_with_cut else 0.0
    separated = problem.separations[stop] if ends_with_cut else 0
    best = UNREACHED
    best_left = 0
    for left in range(stage - 1, right):
        length = problem.prefix[stop] - problem.prefix[problem.boundaries[left]]
        separations, longest_or_sent, squares = before[left]
        if length > limit or longest_or_sent == float("inf"):
            continue
        second = max(longest_or_sent, length) if minimize_longest else longest_or_sent + sent
        value = (separations + separated, second, squares + length**2)
        if value < best:
            best = value
            best_left = left
    return best, best_left
