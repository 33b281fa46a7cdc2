"""Turns result.json into the tables of README.md. Measures nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.report_page import fill, table, told

HERE = Path(__file__).parent
HEAD = ["hosts", "tensor", "Gloo's ring", "ring / what its bytes take", "ordered / ring"]
HEAD += ["without slices / ring"]


def main() -> None:
    result = json.loads((HERE / "result.json").read_text())
    rates = dict.fromkeys(cell["rate_mbit"] for cell in result["cells"])
    parts = [_table(rate, result["cells"]) for rate in rates]
    text = "\n\n".join([*parts, _summary(result["cells"]), told(result["circumstances"])])
    fill(HERE / "README.md", text)
    print(text)


def _table(rate_mbit: int, cells: Sequence[dict[str, Any]]) -> str:
    rows = []
    for cell in (cell for cell in cells if cell["rate_mbit"] == rate_mbit):
        hosts, size_mib, times_s = cell["hosts"], cell["size_mib"], cell["times_s"]
        bytes_s = 2 * (hosts - 1) / hosts * (size_mib << 20) * 8 / (rate_mbit * 1e6)
        ring_s = median(times_s["ring"])
        rows.append(
            [
                f"{hosts}",
                f"{size_mib} MiB",
                f"{ring_s * 1e3:.0f} ms",
                f"{ring_s / bytes_s:.2f}",
                f"**{_spread(_ratios(cell, 'ordered'))}**",
                _spread(_ratios(cell, "whole chunks")),
            ]
        )
    return f"### Links of {rate_mbit} Mbit/s\n\n{table(HEAD, rows)}"


def _summary(cells: Sequence[dict[str, Any]]) -> str:
    lines = []
    for name, told_as in (("ordered", "ordered"), ("whole chunks", "without slices")):
        ratios = sorted(median(_ratios(cell, name)) for cell in cells)
        lines.append(f"{told_as}: {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    return f"Medians of all {len(cells)} cells, over Gloo's ring: {'; '.join(lines)}."


def _ratios(cell: dict[str, Any], name: str) -> list[float]:
    times_s = cell["times_s"]
    return [a / b for a, b in zip(times_s[name], times_s["ring"], strict=True)]


def _spread(ratios: Sequence[float]) -> str:
    low, _, high = quantiles(ratios)
    return f"{median(ratios):.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
