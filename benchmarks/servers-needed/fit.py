"""Measurements against the closed form: medians, one fitted number, deviations. No input
or output.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from shoal.costs.server_count import ring_beside, servers_beside

ENOUGH = 1.05
"""Servers are enough when no larger number is faster by more than this factor."""


@dataclass(frozen=True)
class Point:
    """A cell, what it took, and what the closed form says of it.

    Args: busy: the share of the cores' time that was used.
    """

    by: str
    workers: int
    servers: int
    compute_s: float
    step_s: float
    low_s: float
    high_s: float
    busy: float
    closed_s: float

    @property
    def ratio(self) -> float:
        return self.step_s / self.closed_s


def points(result: Mapping[str, Any], efficiency: float = 1.0) -> list[Point]:
    """All cells of a result. Args: efficiency: the share of the links' measured rate that
    servers are granted.
    """
    rate, setting = median(result["link_bytes_per_s"]), result["setting"]
    size_bytes, parts = setting["size_mib"] * 2**20, setting["size_mib"] / setting["part_mib"]
    found = []
    for cell in result["cells"]:
        by, workers, servers, compute_s = (
            cell[name] for name in ("by", "workers", "servers", "compute_s")
        )
        if by == "servers":
            granted = efficiency * rate
            closed_s = servers_beside(
                size_bytes, granted, workers, servers, parts / servers, compute_s
            )
        else:
            closed_s = ring_beside(size_bytes, rate, workers, parts, compute_s)
        step_s = cell["step_s"]
        times_s = (median(step_s), min(step_s), max(step_s))
        found.append(
            Point(by, workers, servers, compute_s, *times_s, median(cell["busy"]), closed_s)
        )
    return sorted(
        found, key=lambda point: (point.by, point.workers, point.compute_s, point.servers)
    )


def efficiency(found: Iterable[Point]) -> float:
    """The one fitted number: closed form over measured, in the mean of logarithms."""
    return math.exp(-mean(math.log(point.ratio) for point in found))


def deviation(found: Iterable[Point]) -> tuple[float, float]:
    """Mean and greatest of |measured / closed form - 1|."""
    deviations = [abs(point.ratio - 1) for point in found]
    return mean(deviations), max(deviations)


def enough(found: Iterable[Point]) -> int:
    """The smallest number of servers that no larger one beats by more than `ENOUGH`."""
    times_s = {point.servers: point.step_s for point in found}
    return min(n for n, step_s in times_s.items() if step_s <= ENOUGH * min(times_s.values()))
