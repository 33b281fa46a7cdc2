"""Turns result.json into the table of README.md. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.report_page import publish, table

FORMULA = {"whole": 4, "slices": 5}
"""Sums of the stream in a block and step; of those in slices, one in five is half sums that
gather it again.
"""
HEAD = ["", "kept, stream whole", "kept, in slices", "ratio", "sent, stream whole (of 4 sums)"]


def page(result: dict[str, Any]) -> Iterator[str]:
    rows = []
    for degree, block in result["blocks"].items():
        kept = [block[how]["kept_bytes"] / result["stream_bytes"] for how in FORMULA]
        sent = [block[how]["sent_bytes"] / result["stream_bytes"] for how in FORMULA]
        sums = 2 * (int(degree) - 1) / int(degree)
        shares = [a / (b * sums) for a, b in zip(sent, FORMULA.values(), strict=True)]
        cells = [f"{a:.3f} b s h ({b:.4f})" for a, b in zip(sent, shares, strict=True)]
        kept_cells = [f"{value:.2f} b s h" for value in kept]
        rows.append([f"T = {degree}", *kept_cells, f"**{kept[1] / kept[0]:.3f}**", *cells])
    yield table([*HEAD, "sent, in slices (of 5 sums)"], rows)


if __name__ == "__main__":
    publish(Path(__file__).parent, page)
