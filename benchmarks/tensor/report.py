"""Turns result.json into the tables of README.md. Measures nothing."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.interleaved import compared, head
from benchmarks.report_page import fill, table, told

HERE = Path(__file__).parent
YARDSTICKS = {
    "tutorial": "the tutorial's plan",
    "by hand": "a plan with one input for query, key and value",
}


def main() -> None:
    result = json.loads((HERE / "result.json").read_text())
    steps = result["step_s"]
    pairs = (("tutorial", "blocks"), ("by hand", "blocks"), ("by hand", "blocks and vocabulary"))
    rows = [
        [f"{kind}, {YARDSTICKS[who]}", *compared(steps[f"Shoal, {kind}"], steps[f"{who}, {kind}"])]
        for who, kind in pairs
    ]
    titles = head("in slices, against", "`parallelize_module`", len(steps["Shoal, blocks"]))
    measured, formula = result["block_bytes"], result["formula_bytes"]
    sent = table(
        ["summed over ranks, a block and step", "formula, 4 b s h numbers", "ratio"],
        [[f"{measured:,.0f} bytes", f"{formula:,} bytes", f"{measured / formula:.4f}"]],
    )
    text = "\n\n".join([table(titles, rows), sent, told(result["circumstances"])])
    fill(HERE / "README.md", text)
    print(text)


if __name__ == "__main__":
    main()
