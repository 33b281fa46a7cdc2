"""Measurements against the closed form. No input or output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.hosts.closed_form import all_reduce
from shoal.costs.server_count import reduced_beside, servers_beside


@dataclass(frozen=True)
class Point:
    """A cell. Efficiency: the seconds of a step that exchanges nothing, over those of this one.

    Args: closed: the efficiency by closed form. busy: the share of the cores' time that was used.
    """

    by: str
    hosts: int
    ranks_per_host: int
    step_s: float
    efficiency: float
    low: float
    high: float
    closed: float
    busy: float

    @property
    def name(self) -> str:
        return self.by + ", 2 ranks a host" * (self.ranks_per_host == 2)


def points(result: Mapping[str, Any]) -> list[Point]:
    """All cells that exchange something."""
    rate, setting = median(result["link_bytes_per_s"]), result["setting"]
    (alone,) = (median(cell["step_s"]) for cell in result["cells"] if cell["by"] == "nothing")
    found = []
    for cell in result["cells"]:
        by, hosts, each = cell["by"], cell["hosts"], cell["ranks_per_host"]
        if by == "nothing":
            continue
        shares = [alone / step_s for step_s in cell["step_s"]]
        closed = setting["compute_s"] / _closed_s(by, hosts, each, rate, setting)
        middle = (median(cell["step_s"]), median(shares), min(shares), max(shares))
        found.append(Point(by, hosts, each, *middle, closed, median(cell["busy"])))
    return sorted(found, key=lambda point: (point.name, point.hosts))


def _closed_s(by: str, hosts: int, each: int, rate: float, setting: Mapping[str, Any]) -> float:
    """Seconds of a step by closed form."""
    size_bytes, parts = setting["size_mib"] * 2**20, setting["size_mib"] / setting["part_mib"]
    if "server" in by:
        servers = 1 if by == "one server" else hosts
        # A server with less than a part cannot send one while it takes another.
        return servers_beside(
            size_bytes, rate, hosts, servers, max(parts / servers, 1), setting["compute_s"]
        )
    return reduced_beside(
        all_reduce(by, size_bytes, rate, hosts, each), parts, setting["compute_s"]
    )
