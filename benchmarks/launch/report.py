"""Turns result.json into the tables of README.md and launch.png. Measures nothing."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

from benchmarks.report_page import bars, fill, table, told

HERE = Path(__file__).parent
OURS, YARDSTICK = "shoal launch", "torchrun"
MARKS = {
    "all-reduce": "the first all-reduce",
    "optimizer step": "the first optimizer step",
}

Spread = tuple[float, float, float]  # lowest, median, highest


def main() -> None:
    result = json.loads((HERE / "result.json").read_text())
    spreads = {
        mark: {
            ranks: {
                name: _spread([times[mark] for times in by_ranks[ranks]])
                for name, by_ranks in all_times.items()
                if by_ranks[ranks]
            }
            for ranks in next(iter(all_times.values()))
        }
        for all_times in [result["times_s"]]
        for mark in MARKS
    }
    rounds = min(
        len(times)
        for by_ranks in result["times_s"].values()
        for times in by_ranks.values()
        if times
    )
    parts = [_table(MARKS[mark], by_ranks, rounds) for mark, by_ranks in spreads.items()]
    text = "\n\n".join([*parts, told(result["circumstances"])])
    fill(HERE / "README.md", text)
    groups = {
        f"{ranks} rank{'s' if ranks != '1' else ''}": {
            ("Shoal" if n == OURS else n): s for n, s in spread.items()
        }
        for ranks, spread in spreads["optimizer step"].items()
    }
    bars(
        HERE / "launch.png",
        "Seconds from the command to the first optimizer step (median, min, max)",
        "s",
        groups,
        YARDSTICK,
    )
    print(text)


def _spread(values: list[float]) -> Spread:
    return min(values), median(values), max(values)


def _table(mark: str, by_ranks: dict[str, dict[str, Spread]], rounds: int) -> str:
    head = [
        f"seconds to {mark}: median of {rounds}",
        *(f"-n {ranks}" for ranks in by_ranks),
    ]
    names = list(next(iter(by_ranks.values())))
    rows = []
    for name in names:
        cells = [
            f"{spread[name][1]:.2f}" if name in spread else "-" for spread in by_ranks.values()
        ]
        rows.append([f"**{name}**" if name == OURS else name, *cells])
    ratios = [f"{spread[OURS][1] / spread[YARDSTICK][1]:.2f}" for spread in by_ranks.values()]
    return table(head, [*rows, [f"{OURS} / {YARDSTICK}", *ratios]])


if __name__ == "__main__":
    main()
