"""Turns result.json into the tables of README.md. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report_page import publish, quartiles, ratios, spread, table


def page(result: dict[str, Any]) -> Iterator[str]:
    cells = result["cells"]
    rates = dict.fromkeys(cell["rate_mbit"] for cell in cells)
    rows: dict[tuple[int, int], list[str]] = {}
    for cell in cells:
        size = cell["hosts"], cell["size_mib"]
        row = rows.setdefault(size, [f"{size[0]}", f"{size[1]} MiB"])
        row.append(quartiles(_ratios(cell)))
    head = ["hosts", "tensor", *(f"ordered / ring, {rate} Mbit/s" for rate in rates)]
    yield table(head, list(rows.values()))
    middles = spread([median(_ratios(cell)) for cell in cells])
    yield f"Median of all {len(cells)} cells, over Gloo's ring: {middles}."


def _ratios(cell: dict[str, Any]) -> list[float]:
    return ratios(cell["times_s"]["ordered"], cell["times_s"]["ring"])


if __name__ == "__main__":
    publish(Path(__file__).parent, page)
