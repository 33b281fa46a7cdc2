"""Turns result.json into the table of README.md. Measures nothing."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.interleaved import compared, head
from benchmarks.report_page import fill, table, told

HERE = Path(__file__).parent


def main() -> None:
    result = json.loads((HERE / "result.json").read_text())
    steps = result["step_s"]
    rows = [
        [f"`{s}`", *compared(steps[f"Shoal, {s}"], steps[f"by hand, {s}"])]
        for s in ("zero2", "zero3")
    ]
    titles = head("", "`fully_shard`", len(steps["Shoal, zero2"]))
    text = "\n\n".join([table(titles, rows), told(result["circumstances"])])
    fill(HERE / "README.md", text)
    print(text)


if __name__ == "__main__":
    main()
