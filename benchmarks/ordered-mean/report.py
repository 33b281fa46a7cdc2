"""Turns result.json into the tables of README.md. Measures nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.report_page import fill, table, told

HERE = Path(__file__).parent


def main() -> None:
    result = json.loads((HERE / "result.json").read_text())
    cells = result["cells"]
    rates = [*dict.fromkeys(cell["rate_mbit"] for cell in cells)]
    sizes = dict.fromkeys((cell["hosts"], cell["size_mib"]) for cell in cells)
    head = ["hosts", "tensor", *(f"ordered / ring, {rate} Mbit/s" for rate in rates)]
    parts = [table(head, [_row(*size, cells) for size in sizes]), _summary(cells)]
    text = "\n\n".join([*parts, told(result["circumstances"])])
    fill(HERE / "README.md", text)
    print(text)


def _row(hosts: int, size_mib: int, cells: Sequence[dict[str, Any]]) -> list[str]:
    same = [c for c in cells if (c["hosts"], c["size_mib"]) == (hosts, size_mib)]
    return [f"{hosts}", f"{size_mib} MiB", *(_spread(_ratios(cell, "ordered")) for cell in same)]


def _summary(cells: Sequence[dict[str, Any]]) -> str:
    ratios = sorted(median(_ratios(cell, "ordered")) for cell in cells)
    spread = f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    return f"Median of all {len(cells)} cells, over Gloo's ring: {spread}."


def _ratios(cell: dict[str, Any], name: str) -> list[float]:
    times_s = cell["times_s"]
    return [a / b for a, b in zip(times_s[name], times_s["ring"], strict=True)]


def _spread(ratios: Sequence[float]) -> str:
    low, _, high = quantiles(ratios)
    return f"{median(ratios):.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
