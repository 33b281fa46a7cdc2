"""Turns result.json into the tables of README.md. Measures nothing."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report_page import fill, table, told

HERE = Path(__file__).parent
OURS, YARDSTICK, ALONE, NONE = "shoal", "Gloo", "DDP alone", "none"
CALL_PARTS = HERE / "call_parts.json"


def main() -> None:
    result = json.loads((HERE / "result.json").read_text())
    parts = [_part(int(ranks), part) for ranks, part in result["ranks"].items()]
    parts += [_above_none(2, result["ranks"]["2"]["step_s"])]
    parts += _call_parts()
    text = "\n\n".join([*parts, told(result["circumstances"])])
    fill(HERE / "README.md", text)
    print(text)


def _call_parts() -> list[str]:
    """The table of call_parts.json, and when it was measured."""
    if not CALL_PARTS.exists():
        return []
    found = json.loads(CALL_PARTS.read_text())
    parts = found["parts_us"]
    empty = parts.pop("nothing")["fastest"]  # the loop itself
    rows = [
        [name, f"{times['fastest'] - empty:.2f} us"]
        for name, times in sorted(parts.items(), key=lambda part: part[1]["fastest"])
    ]
    head = ["2 ranks: 1 KB", "fastest"]
    return [table(head, rows), f"Calls of 1 KB: {told(found['circumstances'])}"]


def _part(ranks: int, part: dict[str, Any]) -> str:
    sizes, beside = part["times_s"], part["beside_horovod_s"]
    names = [name for name in next(iter(sizes.values())) if name != OURS]
    if "Horovod" in next(iter(beside.values())):
        names.insert(names.index(YARDSTICK) + 1, "Horovod")
    head = [f"{ranks} ranks: an all-reduce", OURS, *(f"{name} / {OURS}" for name in names)]
    rows = []
    for size, times_s in sizes.items():
        runs = {name: beside[size] if name == "Horovod" else times_s for name in names}
        ratios = {name: median(_each(run[name], run[OURS])) for name, run in runs.items()}
        rows.append(
            [
                _bytes(int(size)),
                _time(median(times_s[OURS])),
                *(f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}" for ratio in ratios.values()),
            ]
        )
    lines = [table(head, rows)]
    lines += [f"{name} is missing: {reason}." for name, reason in part["missing"].items()]
    return "\n\n".join(lines)


def _above_none(ranks: int, networks: dict[str, Any]) -> str:
    """The table of what a step takes of the same step without exchange, and what of it is torch's:
    `shoal over DDP alone` is all that a backend could still save."""
    head = [f"{ranks} ranks: step of DDP / without exchange", OURS, ALONE, f"{OURS} / {ALONE}"]
    pairs = [(OURS, NONE), (ALONE, NONE), (OURS, ALONE)]
    rows = []
    for network, found in networks.items():
        if ALONE not in found:
            return ""
        ratios = [median(_each(found[a]["clock"], found[b]["clock"])) for a, b in pairs]
        rows.append([network, *(f"{ratio:.2f}" for ratio in ratios)])
    return table(head, rows)


def _each(times_s: list[float], ours_s: list[float]) -> list[float]:
    return [a / b for a, b in zip(times_s, ours_s, strict=True)]


def _bytes(size: int) -> str:
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"


def _time(time_s: float) -> str:
    return f"{time_s * 1e3:.1f} ms" if time_s >= 1e-3 else f"{time_s * 1e6:.0f} us"


if __name__ == "__main__":
    main()
