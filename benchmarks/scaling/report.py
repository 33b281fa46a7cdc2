"""Turns result.json into the tables and the picture of README.md. Measures nothing."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.report_page import fill, table, told

from . import picture
from .fit import Point, points

HERE = Path(__file__).parent
BUSY = 0.85
NEAR_LINEAR = 0.9
"""An efficiency from which on the article's word "near linear" is granted."""


def main() -> None:
    result = json.loads((HERE / "result.json").read_text())
    found = points(result)
    blocks = [
        _setting(result),
        "### The two claims",
        "\n".join([_ring(found), _one_server(found)]),
        "### Efficiency over hosts: measured (closed form)",
        _efficiencies(found),
        _deviations(found),
        told(result["circumstances"]),
    ]
    text = "\n\n".join(blocks)
    fill(HERE / "README.md", text)
    picture.draw(HERE / "scaling.png", found)
    print(text)


def _setting(result: dict[str, Any]) -> str:
    setting, rates = result["setting"], [rate / 1e6 for rate in result["link_bytes_per_s"]]
    return (
        f"{setting['compute_s']:g} s of waiting in place of computing; {setting['size_mib']} MiB "
        "of float32 gradients "
        f"in buckets of {setting['part_mib']:g} MiB; links of {setting['rate_mbit']} Mbit/s each "
        "way, of which one "
        f"connection carries {median(rates):.1f} MB/s. Medians of {len(rates)} rounds of "
        f"{setting['steps']} steps."
    )


def _ring(found: list[Point]) -> str:
    last = _last(found, "ring")
    holds = "holds here" if last.efficiency >= NEAR_LINEAR else "does not hold here"
    return (
        f"- *A ring scales near linearly* {holds}: on {last.hosts} hosts {last.efficiency:.0%} of "
        f"{last.hosts} times "
        f"one host's samples a second (by closed form {last.closed:.0%}; near linear is taken for "
        f"{NEAR_LINEAR:.0%})."
    )


def _one_server(found: list[Point]) -> str:
    mine = [point for point in found if point.by == "one server"]
    first, last = mine[0], mine[-1]
    best, at = max((point.hosts * point.efficiency, point.hosts) for point in mine)
    holds = "holds here" if last.efficiency < 0.5 * first.efficiency else "does not hold here"
    many = _last(found, "as many servers as workers")
    return (
        f"- *One parameter server collapses* {holds}: {first.efficiency:.0%} of linear on "
        f"{first.hosts} host, "
        f"{last.efficiency:.0%} on {last.hosts} (by closed form {last.closed:.0%}); all hosts "
        "together never do more "
        f"than {best:.1f} times one host's work (on {at}). With as many servers as workers it is "
        f"{many.efficiency:.0%} on {many.hosts}."
    )


def _last(found: list[Point], by: str) -> Point:
    return max(
        (p for p in found if p.by == by and p.ranks_per_host == 1), key=lambda point: point.hosts
    )


def _efficiencies(found: list[Point]) -> str:
    hosts = sorted({point.hosts for point in found})
    rows = []
    for name in dict.fromkeys(point.name for point in found):
        mine = {point.hosts: point for point in found if point.name == name}
        rows.append([name, *(_cell(mine.get(count)) for count in hosts)])
    return table(["hosts", *map(str, hosts)], rows)


def _cell(point: Point | None) -> str:
    if point is None:
        return "-"
    return f"{point.efficiency:.2f} ({point.closed:.2f})" + " †" * (point.busy > BUSY)


def _deviations(found: list[Point]) -> str:
    apart = [abs(point.efficiency / point.closed - 1) for point in found]
    worst = max(found, key=lambda point: abs(point.efficiency / point.closed - 1))
    return (
        f"Measured and closed form differ by {mean(apart):.1%} in the mean, by {max(apart):.1%} at "
        f"most ({worst.name} "
        f"on {worst.hosts} hosts). The cores were busy for {max(p.busy for p in found):.0%} of the "
        "time in the busiest "
        f"cell; † marks more than {BUSY:.0%}."
    )


if __name__ == "__main__":
    main()
