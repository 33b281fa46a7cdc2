"""Turns result.json into the tables and the picture of README.md. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report_page import publish, spread, table
from shoal.costs.server_count import ring_beside, saturation, servers_beside

from . import picture
from .fit import Point, deviation, efficiency, enough, points
from .measure import COMPUTE_S, SERVERS, WORKERS

HERE = Path(__file__).parent
BUSY = 0.85


def page(result: dict[str, Any]) -> Iterator[str]:
    plain = points(result)
    factor = efficiency(point for point in plain if point.by == "servers" and point.compute_s == 0)
    fitted = points(result, factor)
    bare = [point for point in plain if point.compute_s == 0]
    yield _links(result)
    yield "### A step that only exchanges: seconds"
    yield _by_servers("workers", {f"{m}": [p for p in bare if p.workers == m] for m in WORKERS})
    yield _deviations(plain, fitted, factor)
    yield "### How many servers are enough"
    yield _enough(bare, result["setting"], factor)
    yield "### A step of 4 workers that computes meanwhile: seconds"
    groups = {f"{s:g} s": [p for p in plain if p.compute_s == s] for s in COMPUTE_S}
    yield _by_servers("compute", groups)
    picture.draw(HERE / "servers-needed.png", fitted)


def _links(result: dict[str, Any]) -> str:
    setting, rates = result["setting"], [rate / 1e6 for rate in result["link_bytes_per_s"]]
    return (
        f"Links of {setting['rate_mbit']} Mbit/s each way; one connection carries "
        f"{spread(rates, '.1f')} MB/s, the one number that the closed form needs. "
        f"{setting['size_mib']} MiB of float32 in parts of {setting['part_mib']:g} MiB; medians of "
        f"{len(rates)} rounds of {setting['steps']} steps; in brackets, measured / closed form."
    )


def _by_servers(head: str, groups: dict[str, list[Point]]) -> str:
    """A row for each group, a column for each number of servers, and the ring."""
    rows = []
    for name, mine in groups.items():
        best_s = min(point.step_s for point in mine)
        cells = [_one(mine, "servers", n, best_s) for n in SERVERS]
        rows.append([name, *cells, _one(mine, "ring", 0, best_s)])
    return table([head, *[f"{n} server{'s' * (n > 1)}" for n in SERVERS], "ring (Gloo)"], rows)


def _one(mine: Iterable[Point], by: str, servers: int, best_s: float) -> str:
    for point in mine:
        if (point.by, point.servers) == (by, servers):
            mark = "**" if point.step_s == best_s else ""
            return f"{mark}{point.step_s:.2f}{mark} ({point.ratio:.2f})" + " †" * (
                point.busy > BUSY
            )
    return "-"


def _deviations(plain: list[Point], fitted: list[Point], factor: float) -> str:
    rows = []
    for name, by, computes in (
        ("servers, exchange only", "servers", False),
        ("servers, beside compute", "servers", True),
        ("ring", "ring", False),
        ("ring, beside compute", "ring", True),
    ):
        shares = []
        for found in (plain, fitted):
            kept = [p for p in found if p.by == by and (p.compute_s > 0) == computes]
            shares += [f"{100 * share:.1f} %" for share in deviation(kept)]
        rows.append([name, *(shares if by == "servers" else [*shares[:2], "-", "-"])])
    head = ["measured / closed form - 1", "mean deviation", "greatest"]
    head += [f"with η = {factor:.3f}: mean", "greatest"]
    busiest = max(plain, key=lambda point: point.busy)
    median_busy = median(point.busy for point in plain)
    return (
        f"{table(head, rows)}\n\n"
        f"The cores were busy for {100 * median_busy:.0f} % of the time in "
        f"the median cell, for {100 * busiest.busy:.0f} % in the busiest ({busiest.workers} "
        f"workers, {busiest.servers} "
        f"servers); † marks more than {100 * BUSY:.0f} %."
    )


def _ring_is_beaten_by(workers: int, parts: int, efficiency: float) -> int | None:
    """Return the fewest servers that exchange faster than a ring, which uses its links to the full.

    None where none do, up to as many servers as workers.
    """
    for servers in range(1, workers + 1):
        exchange = servers_beside(1, 1, workers, servers, parts / servers) / efficiency
        if exchange < ring_beside(1, 1, workers, parts):
            return servers
    return None


def _enough(bare: list[Point], setting: dict[str, Any], factor: float) -> str:
    rows = []
    for workers in sorted({point.workers for point in bare}):
        mine = [point for point in bare if point.workers == workers and point.by == "servers"]
        rings = [point.step_s for point in bare if point.workers == workers and point.by == "ring"]
        ahead = [point.servers for point in mine if rings and point.step_s < rings[0]]
        parts = round(setting["size_mib"] / setting["part_mib"])
        said = _ring_is_beaten_by(workers, parts, factor) if rings else None
        fastest = min(mine, key=lambda point: point.step_s)
        rows.append(
            [
                str(workers),
                str(saturation(workers, 1, 1)),
                str(enough(mine)),
                f"{fastest.step_s:.2f} s with {fastest.servers}",
                f"{rings[0]:.2f} s" if rings else "-",
                _number(said) if rings else "-",
                _number(min(ahead, default=None)) if rings else "-",
            ]
        )
    head = ["workers", "enough: closed form", "measured", "fastest", "ring"]
    head += ["beaten from: closed form / η", "measured"]
    return table(head, rows)


def _number(found: int | None) -> str:
    return "never" if found is None else str(found)


if __name__ == "__main__":
    publish(HERE, page)
