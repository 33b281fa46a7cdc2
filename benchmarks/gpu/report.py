"""Turns result.json into the table of README.md. Measures nothing."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.report_page import fill, table, told

HERE = Path(__file__).parent
YARDSTICK = "by hand"
HEAD = [
    "step on one GPU",
    "time",
    "speed / by hand: median (quartiles)",
    "MFU",
    "waits in a step",
    "memory",
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--result", type=Path, default=HERE / "result.json")
    parser.add_argument("--print", action="store_true", help="do not write the page")
    options = parser.parse_args()
    text = page(json.loads(options.result.read_text()))
    if not options.print:
        fill(HERE / "README.md", text)
    print(text)


def page(result: dict[str, Any]) -> str:
    """Return the table, and the circumstances."""
    rows = [row for name, task in result["tasks"].items() for row in _rows(name, task)]
    lines = [table(HEAD, rows), f"{result['device']}; MFU is a share of {result['peak']}."]
    if "timm" in result:
        speed = result["timm"]["train_samples_per_sec"]
        lines.append(f"timm's own benchmark of ResNet-50: {speed} samples/s.")
    if result["smoke"]:
        lines.append("Tiny models: this shows that the programs run, and nothing else.")
    return "\n\n".join([*lines, told(result["circumstances"])])


def _rows(name: str, task: dict[str, Any]) -> list[list[str]]:
    yardstick = task["step_s"][YARDSTICK]
    rows = []
    for candidate, times in task["step_s"].items():
        low, middle, high = quantiles([b / a for a, b in zip(times, yardstick, strict=True)])
        share = task["flops"] / median(times) / task["peak_flops"]
        waits, memory = task["waits_per_step"][candidate], task["memory_bytes"][candidate]
        bold = f"**{middle:.3f}**" if candidate == "Shoal" else f"{middle:.3f}"
        rows.append(
            [
                f"{name}: {candidate}",
                f"{median(times) * 1e3:.2f} ms",
                "1" if candidate == YARDSTICK else f"{bold} ({low:.3f} to {high:.3f})",
                f"{share:.1%}",
                "" if waits is None else f"{waits:.1f}",
                "" if memory is None else f"{memory / 2**30:.1f} GiB",
            ]
        )
    return rows


if __name__ == "__main__":
    main()
