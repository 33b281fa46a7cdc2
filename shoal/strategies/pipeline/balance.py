"""Where to cut, so that stages take equally long and little crosses the cuts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

SLACK = 1.05
"""How much longer than the best cut's longest stage another cut's may be, if less is sent."""


def balanced(
    costs: Sequence[float],
    crossing: Sequence[float],
    places: Sequence[int],
    stages: int,
    parted: Sequence[int] | None = None,
) -> list[int]:
    """The steps that begin stages 1, 2, ...: the longest stage is nearly as short as can be, with
    the least to send.

    Args: costs: of each step, in any unit. crossing: what is sent where stage begins with step i,
        for each i; any unit. places: steps that may begin a stage, ascending. stages: at most
        len(places) + 1. parted: how much that belongs together lies on both sides of step i's
        beginning, for each i. As little as can
            be is parted, whatever that does to the length of stages.

    Returns: stages - 1 of `places`, ascending.
    """
    assert 0 < stages <= len(places) + 1
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    ends = [0, *places, len(costs)]
    parts = parted or [0] * len(crossing)
    shortest = _partition(
        before, [0.0] * len(crossing), parts, ends, stages, float("inf"), longest=True
    )
    limit = max(b - a for a, b in _spans(before, shortest, len(costs))) * SLACK
    return _partition(before, crossing, parts, ends, stages, limit + 1e-30, longest=False)


def _partition(
    before: Sequence[float],
    crossing: Sequence[float],
    parted: Sequence[int],
    ends: Sequence[int],
    stages: int,
    limit: float,
    longest: bool,
) -> list[int]:
    """By dynamic programming: the best way to have k stages end at each place, k = 1, 2, ...

    What is made small: what is parted; then the longest stage, or what is sent in all where no
    stage is longer than `limit`; of equals, the sum of squares, so that the rest is even too."""
    none = (float("inf"), float("inf"), float("inf"))
    best: list[list[tuple[float, float, float]]] = [[none] * len(ends) for _ in range(stages + 1)]
    came: list[list[int]] = [[0] * len(ends) for _ in range(stages + 1)]
    best[0][0] = (0.0, 0.0, 0.0)
    for stage in range(1, stages + 1):
        for right in range(stage, len(ends)):
            for left in range(stage - 1, right):
                length = before[ends[right]] - before[ends[left]]
                parts, known, squares = best[stage - 1][left]
                if length > limit or known == float("inf"):
                    continue
                inner = right < len(ends) - 1
                sent, more = (crossing[ends[right]], parted[ends[right]]) if inner else (0.0, 0)
                value = (
                    parts + more,
                    max(known, length) if longest else known + sent,
                    squares + length**2,
                )
                if value < best[stage][right]:
                    best[stage][right], came[stage][right] = value, left
    cuts, at = [], len(ends) - 1
    for stage in range(stages, 1, -1):
        at = came[stage][at]
        cuts.append(ends[at])
    return cuts[::-1]


def _spans(before: Sequence[float], cuts: Sequence[int], count: int) -> list[tuple[float, float]]:
    marks = [0, *cuts, count]
    return [(before[a], before[b]) for a, b in pairwise(marks)]
