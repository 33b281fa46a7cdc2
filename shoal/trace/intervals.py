"""Sets of moments, as stretches [start, end) of whole numbers: sorted, apart from each other,
none empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[int, int]
Intervals = Sequence[Interval]


def union(stretches: Iterable[Interval]) -> list[Interval]:
    """All moments in any of these stretches, which may overlap and be empty."""
    found: list[Interval] = []
    for start, end in sorted(stretches):
        if end <= start:
            continue
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def intersection(first: Intervals, second: Intervals) -> list[Interval]:
    """Moments in both sets."""
    found, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            found.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def difference(first: Intervals, second: Intervals) -> list[Interval]:
    """Moments in the first set that are not in the second."""
    found, at = [], 0
    for start, end in first:
        while at < len(second) and second[at][1] <= start:
            at += 1
        place = at
        while place < len(second) and second[place][0] < end:
            if second[place][0] > start:
                found.append((start, second[place][0]))
            start = max(start, second[place][1])
            place += 1
        if start < end:
            found.append((start, end))
    return found


def total_length(stretches: Intervals) -> int:
    """How long they are together."""
    return sum(end - start for start, end in stretches)
