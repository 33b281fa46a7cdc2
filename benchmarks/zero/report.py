"""Turns result.json into the table of README.md. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report_page import publish, quartiles, ratios, table


def page(result: dict[str, Any]) -> Iterator[str]:
    steps, rows = result["step_s"], []
    for strategy in ("zero2", "zero3"):
        hand, ours = steps[f"by hand, {strategy}"], steps[f"Shoal, {strategy}"]
        middles = [f"{1000 * median(times_s):.1f} ms" for times_s in (hand, ours)]
        rows.append([f"`{strategy}`", *middles, quartiles(ratios(ours, hand), ".3f", "**")])
    rounds = f"ratio: median of {len(hand)} rounds (quartiles)"
    yield table(["", "`fully_shard` by hand", "Shoal", rounds], rows)


if __name__ == "__main__":
    publish(Path(__file__).parent, page)
