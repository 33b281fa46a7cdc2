"""Turns result.json into the table of README.md. Measures nothing."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

from benchmarks.report_page import fill, table, told

HERE = Path(__file__).parent


def main() -> None:
    result = json.loads((HERE / "result.json").read_text())
    rows = [_row(network, times_s) for network, times_s in result["step_s"].items()]
    head = [
        "2 ranks, ddp",
        "a step without",
        "asked for / without",
        "recording / without",
        "recording costs",
    ]
    text = "\n\n".join([table(head, rows), told(result["circumstances"])])
    fill(HERE / "README.md", text)
    print(text)


def _row(network: str, times_s: dict[str, list[float]]) -> list[str]:
    asked, recording = (
        [a / b for a, b in zip(times_s[way], times_s["none"], strict=True)]
        for way in ("asked for", "recording")
    )
    more_s = median(a - b for a, b in zip(times_s["recording"], times_s["none"], strict=True))
    return [
        network,
        f"{median(times_s['none']) * 1e3:.2f} ms",
        f"{median(asked):.3f}",
        f"{median(recording):.3f}",
        f"{more_s * 1e6:.0f} us a step",
    ]


if __name__ == "__main__":
    main()
