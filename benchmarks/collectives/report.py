"""Turns result.json and call_parts.json into the tables of README.md. Measures nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report_page import publish, ratios, table, told

HERE = Path(__file__).parent
OURS, YARDSTICK, ALONE, NONE = "shoal", "Gloo", "DDP alone", "none"


def page(result: dict[str, Any]) -> Iterator[str]:
    for ranks, part in result["ranks"].items():
        yield _all_reduces(ranks, part)
        yield "\n\n".join(f"{name} is missing: {why}." for name, why in part["missing"].items())
    yield _steps(result["ranks"]["2"]["step_s"])
    yield from _call_parts(json.loads((HERE / "call_parts.json").read_text()))


def _call_parts(found: dict[str, Any]) -> Iterator[str]:
    """The table of call_parts.json, and when it was measured."""
    parts = found["parts_us"]
    empty = parts.pop("nothing")["fastest"]  # the loop itself
    rows = [
        [name, f"{times['fastest'] - empty:.2f} us"]
        for name, times in sorted(parts.items(), key=lambda part: part[1]["fastest"])
    ]
    yield table(["2 ranks: 1 KB", "fastest"], rows)
    yield f"Calls of 1 KB: {told(found['circumstances'])}"


def _all_reduces(ranks: str, part: dict[str, Any]) -> str:
    sizes, beside = part["times_s"], part["beside_horovod_s"]
    names = [name for name in next(iter(sizes.values())) if name != OURS]
    if "Horovod" in next(iter(beside.values())):
        names.insert(names.index(YARDSTICK) + 1, "Horovod")
    rows = []
    for size, times_s in sizes.items():
        row = [_bytes(int(size)), _time(median(times_s[OURS]))]
        for name in names:
            run = beside[size] if name == "Horovod" else times_s
            ratio = median(ratios(run[name], run[OURS]))
            row.append(f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}")
        rows.append(row)
    head = [f"{ranks} ranks: an all-reduce", OURS, *(f"{name} / {OURS}" for name in names)]
    return table(head, rows)


def _steps(networks: dict[str, Any]) -> str:
    """The table of what a step takes of the same step without exchange, and what of it is torch's:
    `shoal over DDP alone` is all that a backend could still save."""
    head = ["2 ranks: step of DDP / without exchange", OURS, ALONE, f"{OURS} / {ALONE}"]
    pairs = [(OURS, NONE), (ALONE, NONE), (OURS, ALONE)]
    rows = [
        [network, *(f"{median(ratios(found[a], found[b])):.2f}" for a, b in pairs)]
        for network, found in networks.items()
    ]
    return table(head, rows)


def _bytes(size: int) -> str:
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"


def _time(time_s: float) -> str:
    return f"{time_s * 1e3:.1f} ms" if time_s >= 1e-3 else f"{time_s * 1e6:.0f} us"


if __name__ == "__main__":
    publish(HERE, page)
