"""Turns result.json into the table of README.md. Measures nothing."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median, quantiles

from benchmarks.page import fill, table, told

HERE = Path(__file__).parent


def main() -> None:
    result = json.loads((HERE / "result.json").read_text())
    rows = []
    for stage in ("zero2", "zero3"):
        ours, yardstick = (result["step_s"][f"{who}, {stage}"] for who in ("Shoal", "by hand"))
        ratios = [a / b for a, b in zip(ours, yardstick, strict=True)]
        low, _, high = quantiles(ratios)
        rows.append(
            [
                f"`{stage}`",
                f"{1000 * median(yardstick):.1f} ms",
                f"{1000 * median(ours):.1f} ms",
                f"**{median(ratios):.3f}** ({low:.3f} to {high:.3f})",
            ]
        )
    head = ["", "`fully_shard` by hand", "Shoal", f"ratio: median of {len(ours)} rounds (quartiles)"]
    text = "\n\n".join([table(head, rows), told(result["circumstances"])])
    fill(HERE / "README.md", text)
    print(text)


if __name__ == "__main__":
    main()
