"""Turns result.json into the table of README.md. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report_page import publish, ratios, table

HEAD = ["2 ranks, ddp", "a step without", "asked for / without", "recording / without"]


def page(result: dict[str, Any]) -> Iterator[str]:
    rows = [_row(network, times_s) for network, times_s in result["step_s"].items()]
    yield table([*HEAD, "recording costs"], rows)


def _row(network: str, times_s: dict[str, list[float]]) -> list[str]:
    none = times_s["none"]
    shares = [median(ratios(times_s[way], none)) for way in ("asked for", "recording")]
    more_s = median(a - b for a, b in zip(times_s["recording"], none, strict=True))
    middle = f"{median(none) * 1e3:.2f} ms"
    return [network, middle, *(f"{share:.3f}" for share in shares), f"{more_s * 1e6:.0f} us a step"]


if __name__ == "__main__":
    publish(Path(__file__).parent, page)
