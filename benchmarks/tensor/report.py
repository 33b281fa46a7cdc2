"""Turns result.json into the tables of README.md. Measures nothing."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median, quantiles

from benchmarks.page import fill, table, told

HERE = Path(__file__).parent


def main() -> None:
    result = json.loads((HERE / "result.json").read_text())
    rows = []
    for what in ("blocks", "blocks and vocabulary"):
        ours, yardstick = (result["step_s"][f"{who}, {what}"] for who in ("Shoal", "by hand"))
        ratios = [a / b for a, b in zip(ours, yardstick, strict=True)]
        low, _, high = quantiles(ratios)
        rows.append(
            [
                what,
                f"{1000 * median(yardstick):.1f} ms",
                f"{1000 * median(ours):.1f} ms",
                f"**{median(ratios):.3f}** ({low:.3f} to {high:.3f})",
            ]
        )
    head = ["in slices", "`parallelize_module` by hand", "Shoal", f"ratio: median of {len(ours)} rounds (quartiles)"]
    measured, formula = result["block_bytes"], result["formula_bytes"]
    sent = table(
        ["summed over ranks, a block and step", "formula, 4 b s h numbers", "ratio"],
        [[f"{measured:,.0f} bytes", f"{formula:,} bytes", f"{measured / formula:.4f}"]],
    )
    text = "\n\n".join([table(head, rows), sent, told(result["circumstances"])])
    fill(HERE / "README.md", text)
    print(text)


if __name__ == "__main__":
    main()
