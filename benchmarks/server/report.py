"""Turns result.json into the tables of README.md and server.png. Measures nothing."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.report_page import bars, fill, table, told
from benchmarks.server.measure import CANDIDATES, MIB

HERE = Path(__file__).parent
OURS, YARDSTICK = ("Shoal", "Shoal over TCP"), "TCP echo, streamed"
COMPARED = (("Shoal", 4), ("Shoal", 64), ("Shoal over TCP", 64))  # MiB
DRAWN = ("2,1", "2,2", "4,4")  # workers, servers
DRAWN_MIB = 64

Cell = dict[str, Any]
Spread = tuple[float, float, float]  # lower quartile, median, upper quartile


def main() -> None:
    result = json.loads((HERE / "result.json").read_text())
    by_crew: dict[str, dict[int, Cell]] = {}
    for cell in sorted(
        result["cells"], key=lambda cell: (cell["workers"], cell["servers"], cell["mib"])
    ):
        by_crew.setdefault(f"{cell['workers']},{cell['servers']}", {})[cell["mib"]] = cell
    parts = [comparison(ours, by_crew, mib) for ours, mib in COMPARED]
    parts += [absent(result["missing"]), told(result["circumstances"])]
    text = "\n\n".join(part for part in parts if part)
    fill(HERE / "README.md", text)
    groups = {
        told_crew(crew): spreads(by_crew[crew][DRAWN_MIB])
        for crew in DRAWN
        if DRAWN_MIB in by_crew.get(crew, {})
    }
    bars(
        HERE / "server.png",
        f"Push and pull of {DRAWN_MIB} MiB (median, quartiles)",
        "GB/s",
        groups,
        YARDSTICK,
    )
    print(text)


def spreads(cell: Cell) -> dict[str, Spread]:
    """GB/s of every candidate: what all workers push and pull in a round, over its time."""
    moved_gb = 2 * cell["workers"] * cell["mib"] * MIB / 1e9
    return {
        name: _spread([moved_gb / time_s for time_s in times])
        for name, times in cell["round_s"].items()
    }


def comparison(ours: str, by_crew: dict[str, dict[int, Cell]], mib: int) -> str:
    """One table: how many times faster we are than each of the others."""
    crews = {crew: cells[mib]["round_s"] for crew, cells in by_crew.items() if mib in cells}
    head = [
        f"{ours}: GB/s over theirs, {mib} MiB",
        *(told_crew(crew) for crew in crews),
    ]
    rows = [
        [name, *(_ratio(times, name, ours) for times in crews.values())]
        for name in CANDIDATES
        if name not in OURS
    ]
    return table(head, [row for row in rows if set(row[1:]) != {"-"}])


def absent(missing: dict[str, dict[str, str]]) -> str:
    """Why something is missing, each reason once."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for crew, names in missing.items():
        for name, why in names.items():
            reasons.setdefault((name, why), []).append(told_crew(crew))
    lines = []
    for (name, why), crews in reasons.items():
        extent = "everywhere" if len(crews) == len(missing) else f"with {'; '.join(crews)}"
        lines.append(f"- {name} is missing {extent}: {why}.")
    return "\n".join(lines)


def told_crew(crew: str) -> str:
    """`2 workers, 1 server`."""
    workers, servers = crew.split(",")
    return f"{workers} worker{'s' * (workers != '1')}, {servers} server{'s' * (servers != '1')}"


def _ratio(times_s: dict[str, list[float]], slower: str, faster: str) -> str:
    """Return the median ratio of the times of `slower` and `faster`, round by round."""
    if slower not in times_s or faster not in times_s:
        return "-"
    ratios = (a / b for a, b in zip(times_s[slower], times_s[faster], strict=True))
    return f"{median(ratios):.2f}"


def _spread(values: list[float]) -> Spread:
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return low, middle, high


if __name__ == "__main__":
    main()
