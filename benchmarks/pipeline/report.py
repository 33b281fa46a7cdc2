"""Turns result.json into the tables of README.md. Measures nothing."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.page import fill, table, told

HERE = Path(__file__).parent


def main() -> None:
    result = json.loads((HERE / "result.json").read_text())
    head = [
        "stages that wait",
        "ranks",
        "micro-batches",
        "formula",
        "measured, rank by rank",
        "ratio",
        "held",
        "by table",
    ]
    rows = []
    for case in result["waiting"]:
        ratios = [idle / case["formula"] for idle in case["idle"]]
        rows.append(
            [
                f"`{case['schedule']}`",
                str(case["ranks"]),
                str(case["microbatches"]),
                f"{100 * case['formula']:.1f} %",
                " ".join(f"{100 * idle:.1f}" for idle in case["idle"]) + " %",
                f"{min(ratios):.3f} to {max(ratios):.3f}",
                " ".join(map(str, case["held"])),
                " ".join(map(str, case["in_flight"])),
            ]
        )
    real_head = ["a GPT of eight blocks", "micro-batches", "formula", "waiting, rank by rank", "step"]
    real = [
        [
            f"`{case['schedule']}`",
            str(case["microbatches"]),
            f"{100 * case['formula']:.1f} %",
            " ".join(f"{100 * idle:.1f}" for idle in case["idle"]) + " %",
            f"{1000 * case['step_s']:.0f} ms",
        ]
        for case in result["real"]
    ]
    tables = [table(head, rows)] + ([table(real_head, real)] if real else [])
    text = "\n\n".join([*tables, told(result["circumstances"])])
    fill(HERE / "README.md", text)
    print(text)


if __name__ == "__main__":
    main()
