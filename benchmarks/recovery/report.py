"""Turns result.json into the table of README.md. Measures nothing."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report_page import fill, table, told

HERE = Path(__file__).parent


def main() -> None:
    result = json.loads((HERE / "result.json").read_text())
    head = ["what is killed", "kills", "next step, s", "all take part again, s", "steps done twice"]
    rows = [
        [
            name,
            f"{sum(found is not None for found in all_found)} of {len(all_found)}",
            spread(all_found, "step_s"),
            spread(all_found, "all_s" if any("all_s" in f for f in all_found if f) else "step_s"),
            spread(all_found, "lost", 0),
        ]
        for name, all_found in result["recoveries"].items()
    ]
    text = "\n\n".join([table(head, rows), told(result["circumstances"])])
    fill(HERE / "README.md", text)
    print(text)


def spread(all_found: list[dict[str, Any] | None], key: str, digits: int = 2) -> str:
    """Return median and range; a dash where nothing was measured."""
    values = [found[key] for found in all_found if found is not None]
    if not values:
        return "-"
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


if __name__ == "__main__":
    main()
