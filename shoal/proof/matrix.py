"""`python -m shoal.proof.matrix docs/verified.md`: every strategy on every model of the zoo, as a page.

`make verified` calls it. No hand writes that page.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterable
from datetime import date
from pathlib import Path

import torch

import shoal
from shoal.proof.verdict import TOLERANCE, Verdict, prove
from shoal.proof.zoo import EXPERIMENTS

LAYOUTS = [
    ("single", 1, 1),
    ("ddp", 2, 1),
    ("ddp", 4, 1),
    ("ddp", 3, 4),
    ("zero1", 3, 1),
    ("zero1", 2, 3),
    ("zero2", 2, 1),
    ("zero2", 2, 2),
    ("zero3", 2, 1),
    ("zero3", 4, 1),
    ("zero3", 3, 4),
    ("zero3,unit=Linear", 2, 1),
    ("zero3,hybrid=2", 4, 1),
    ("zero2,offload=true", 2, 1),
    ("recompute,single", 1, 1),
    ("recompute=2,unit=Linear,zero3", 2, 1),
    ("server=1", 2, 1),
    ("server=2", 3, 1),
    ("server=3,part_mb=0.001", 2, 2),
    ("server=2,replicas=2", 2, 1),
    ("tensor=2", 2, 1),
    ("tensor=2,ddp", 4, 1),
    ("tensor=2,zero1", 4, 2),
    ("tensor=2,zero3", 4, 1),
    ("pipeline=2,schedule=naive", 2, 1),
    ("pipeline=2,schedule=gpipe", 2, 1),
    ("pipeline=2,schedule=1f1b", 2, 1),
    ("pipeline=2,schedule=interleaved", 2, 1),
    ("pipeline=2,schedule=zero-bubble", 2, 1),
    ("pipeline=2,schedule=zbv", 2, 1),
    ("pipeline=4,microbatches=3", 4, 1),
    ("pipeline=2,ddp", 4, 1),
    ("pipeline=2,schedule=zbv,zero1", 4, 1),
    ("pipeline=2,zero3", 4, 2),
    ("pipeline=2,schedule=zero-bubble,recompute,zero2", 4, 1),
]
"""Strategy, ranks, parts that each rank's share is accumulated in."""

PAGE = """\
# What was verified

Each cell trained a model for {steps} steps of SGD with momentum, once by a plain PyTorch loop in one process and once
under the strategy, in float64 on the CPU, from the same weights on the same global batches (10, 10, 10, 1 samples: some
ranks have none). Compared on every rank: every parameter's gradient in every step, every loss, every weight at the end.
A number is the largest relative error of a cell that is **exact**, which means {tolerance:g} or less.

{table}

{notes}

Written by `make verified` on {date}: {circumstances}. Try it on your own model: `shoal verify --help`, or
[`shoal.verify`](library.md).
"""


def main(path: str) -> None:
    """Write the page."""
    verdicts = {}
    for name, experiment in EXPERIMENTS.items():
        for layout in LAYOUTS:
            strategy, ranks, accumulate = layout
            verdicts[name, layout] = verdict = prove(experiment, strategy, ranks, accumulate=accumulate, timeout_s=120)
            print(f"{name}: {str(verdict).splitlines()[-1]}", flush=True)
    Path(path).write_text(page(verdicts))


def page(verdicts: dict[tuple[str, tuple[str, int, int]], Verdict]) -> str:
    """The page in Markdown; reasons are numbered below the table. A row of which nothing was run is left out."""
    reasons: list[str] = []
    head = ["strategy", "ranks", *EXPERIMENTS]
    rows = [
        [f"`{strategy}`", _ranks(ranks, accumulate)]
        + [_cell(verdicts.get((name, (strategy, ranks, accumulate))), reasons) for name in EXPERIMENTS]
        for strategy, ranks, accumulate in LAYOUTS
        if any((name, (strategy, ranks, accumulate)) in verdicts for name in EXPERIMENTS)
    ]
    steps = next(iter(EXPERIMENTS.values())).steps
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, shoal {shoal.__version__}"
    return PAGE.format(
        steps=steps,
        tolerance=TOLERANCE,
        table="\n".join(_row(row) for row in [head, ["---"] * len(head), *rows]),
        notes="\n".join(f"{number}. {reason}" for number, reason in enumerate(reasons, start=1)),
        date=date.today().isoformat(),
        circumstances=versions,
    )


def word(verdict: Verdict) -> str:
    """What a cell begins with."""
    return {"exact": "exact", "differs by design": "by design", "refused": "refused", "differs": "DIFFERS"}[
        verdict.verdict
    ]


def words(text: str) -> dict[tuple[str, tuple[str, int, int]], str]:
    """What each cell of a page begins with."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    found = {}
    for strategy, ranks, *cells in lines[2:]:
        number, _, parts = ranks.partition(" x ")
        layout = (strategy.strip("`"), int(number), int(parts.partition(" ")[0] or 1))
        for name, cell in zip(lines[0][2:], cells, strict=True):
            found[name, layout] = re.sub(r"[^A-Za-z ].*", "", cell).strip()
    return found


def _cell(verdict: Verdict | None, reasons: list[str]) -> str:
    if verdict is None:
        return "not run"
    if verdict.verdict == "exact":
        return f"exact {verdict.max_relative_error:.0e}"
    numbers = []
    for reason in verdict.reasons:
        if reason not in reasons:
            reasons.append(reason)
        numbers.append(str(reasons.index(reason) + 1))
    return f"{word(verdict)} ({', '.join(numbers)})"


def _ranks(ranks: int, accumulate: int) -> str:
    return str(ranks) if accumulate == 1 else f"{ranks} x {accumulate} accumulated"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main(sys.argv[1])
