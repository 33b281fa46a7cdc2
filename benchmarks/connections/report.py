"""Turns result.json into the table of README.md. Measures nothing."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

from benchmarks.page import fill, table, told

HERE = Path(__file__).parent
MIB = 2**20


def main() -> None:
    result = json.loads((HERE / "result.json").read_text())
    setting = result["setting"]
    counts = list(result["step_s"]["near"])
    head = ["connections", "one, by itself", *counts]
    rows = []
    for name, times_s in result["step_s"].items():
        place = setting["places"][name]
        carried = median(result["link_bytes_per_s"][name]) * 8 / 1e6
        cells = [_spread(times_s[count], times_s["1"]) for count in counts]
        rows.append([f"{name}: {_described(place)}", f"{carried:.0f} Mbit/s", *cells])
    rounds = len(result["step_s"]["near"]["1"])
    about = (
        f"Seconds to push and pull {setting['size_mib']} MiB in parts of {setting['part_mib']} MiB, one worker, one "
        f"server; the median of {rounds} rounds (the least to the most), and how many times faster than by one "
        "connection."
    )
    text = "\n\n".join([about, table(head, rows), told(result["circumstances"])])
    fill(HERE / "README.md", text)
    print(text)


def _described(place: dict[str, float | None]) -> str:
    flight_s, window_bytes = place["flight_s"] or 0.0, place["window_bytes"]
    window = "" if window_bytes is None else f", buffers of at most {window_bytes / 1024:.0f} KiB"
    return f"{place['rate_mbit']} Mbit/s, {2000 * flight_s:.0f} ms there and back{window}"


def _spread(values: list[float], by_one: list[float]) -> str:
    ratio = median(one / value for one, value in zip(by_one, values, strict=True))
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f}), {ratio:.2f} x"


if __name__ == "__main__":
    main()
