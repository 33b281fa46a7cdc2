"""Sets of moments as sorted lists of intervals.

      {0, 1, 2, 5, 6}   ->   [(0, 3), (5, 7)]

Intervals are half-open, [start, end), of integers. The intervals of a set neither overlap nor
touch, and none is empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[int, int]
Intervals = Sequence[Interval]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the moments in any of these intervals, which may overlap or be empty."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def intersection(first: Intervals, second: Intervals) -> list[Interval]:
    """Return the moments in both sets."""
    result = []
    i = 0
    j = 0
    while i < len(first) and j < len(second):
        start = max(first[i][0], second[j][0])
        end = min(first[i][1], second[j][1])
        if start < end:
            result.append((start, end))
        # The interval that ends first overlaps nothing later.
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return result


def difference(first: Intervals, second: Intervals) -> list[Interval]:
    """Return the moments in the first set that are not in the second."""
    result = []
    begin = 0  # intervals of `second` before this index end before all of `first` that remain
    for start, end in first:
        while begin < len(second) and second[begin][1] <= start:
            begin += 1
        index = begin
        while index < len(second) and second[index][0] < end:
            if second[index][0] > start:
                result.append((start, second[index][0]))
            start = max(start, second[index][1])
            index += 1
        if start < end:
            result.append((start, end))
    return result


def total_length(intervals: Intervals) -> int:
    """Return the number of moments."""
    return sum(end - start for start, end in intervals)
