"""`python -m tests.matrix.report docs/verified.md`: all strategies on all models, as a page.

`make verified` calls it. Never edit that page by hand, nor verified.json beside it, from which the
page is made. With `--more` only those cells are measured that are missing, or that differed.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from string import ascii_lowercase
from typing import NamedTuple

import torch

import shoal
from shoal.verification.trajectory import Experiment
from shoal.verification.verdict import TOLERANCE, verify_job
from tests.matrix.cases import EXPERIMENTS
from tests.scripts.report import clause

LAYOUTS = [
    ("single", 1, 1),
    ("dataparallel", 1, 1),
    ("ddp", 2, 1),
    ("ddp", 4, 1),
    ("ddp", 3, 4),
    ("ddp,bucket_mb=0.001", 2, 1),  # small buckets, which overlap with the backward pass
    ("ddp,bucket_mb=0.001", 3, 2),
    ("ddp,allreduce=ring", 3, 1),
    ("ddp,allreduce=ring", 4, 2),
    ("ddp,allreduce=tree", 3, 1),
    ("ddp,allreduce=hierarchical", 4, 1),
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
    ("ddp,compress=powersgd=1000", 3, 2),
    ("ddp,compress=topk=0.1", 2, 1),
    ("local=1", 3, 1),
    ("diloco=2", 2, 1),
    ("tensor=2", 2, 1),
    ("tensor=2,ddp", 4, 1),
    ("tensor=2,zero1", 4, 2),
    ("tensor=2,zero3", 4, 1),
    ("tensor=2,sequence=true", 2, 1),
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
    ("tensor=2,pipeline=2,balance=parameters,ddp", 4, 1),
    ("tensor=2,pipeline=2,balance=parameters,schedule=gpipe,ddp", 8, 1),
    ("tensor=2,pipeline=2,balance=parameters,schedule=interleaved,zero1", 8, 2),
    ("tensor=2,pipeline=2,balance=parameters,schedule=zbv,zero1", 8, 1),
    ("tensor=2,pipeline=2,balance=parameters,schedule=zero-bubble,recompute,zero3", 8, 1),
]
"""Strategy, ranks, and micro-batches of each rank's local batch."""

PAGE = """\
# What was verified

Each cell trained a model for {steps} steps of SGD with momentum, once by a plain PyTorch loop in
one process and once under the strategy, in float64 on the CPU, from the same weights on the same
global batches (10, 10, 10, 1 samples: some ranks have none). Compared on every rank: every
parameter's gradient in every step, every loss, every weight at the end.

A cell is **exact** where the largest relative error is at most {tolerance:g}; in all {exact} exact
cells it is at most {largest:.0e}. The table names the models that are not exact, each by a letter,
and in brackets the number of the reason below: {models}.
`on 3 x 4` are 3 ranks with 4 micro-batches each. Every cell is in
[verified.json](verified.json).

{table}

{notes}

Written by `make verified` on {date}: Python {python}, torch {torch}, shoal {shoal}.
Try it on your own model: `shoal verify --help`, or [`shoal.verify`](proof.md#from-python).
"""


Key = tuple[str, str, int, int]
"""Model, strategy, ranks, micro-batches."""


class Cell(NamedTuple):
    """The result of one strategy with one model; the first three fields are those of Verdict."""

    verdict: str
    max_relative_error: float | None
    reasons: list[str]
    date: str  # ISO 8601


def main() -> None:
    """Measure all cells, and write the page and its JSON.

    Both are written after each model, so that an interrupted run loses little.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("page", type=Path)
    parser.add_argument(
        "--more", action="store_true", help="keep what has been measured and does not differ"
    )
    options = parser.parse_args()
    data = options.page.with_suffix(".json")
    cells = read(data) if options.more else {}
    for name, experiment in EXPERIMENTS.items():
        for layout in LAYOUTS:
            if (name, *layout) not in cells or cells[name, *layout].verdict == "differs":
                cells[name, *layout] = _measure(name, experiment, *layout)
        write(data, cells)
        options.page.write_text(page(cells))


def _measure(name: str, experiment: Experiment, strategy: str, ranks: int, accumulate: int) -> Cell:
    verdict = verify_job(experiment, strategy, ranks, accumulate=accumulate, timeout_s=120)
    print(f"{name}: {str(verdict).splitlines()[-1]}", flush=True)
    error = verdict.to_json()["max_relative_error"]
    return Cell(verdict.verdict, error, verdict.reasons, date.today().isoformat())


def read(data: Path) -> dict[Key, Cell]:
    """Return the cells of a file of `write`, without those that are no longer in the matrix."""
    current = {(name, *layout) for name in EXPERIMENTS for layout in LAYOUTS}
    cells = {tuple(key): Cell(*cell) for key, cell in json.loads(data.read_text())}
    return {key: cell for key, cell in cells.items() if key in current}


def write(data: Path, cells: Mapping[Key, Cell]) -> None:
    """Write the cells as JSON, one on each line."""
    lines = [json.dumps([key, cell]) for key, cell in cells.items()]
    data.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def page(cells: Mapping[Key, Cell]) -> str:
    """Return the page in Markdown. Reasons are numbered below the table."""
    reasons: dict[str, str] = {}  # filled by _exceptions
    groups: dict[str, list[str]] = {}
    for strategy, ranks, accumulate in LAYOUTS:
        keys = {name: (name, strategy, ranks, accumulate) for name in EXPERIMENTS}
        row = {name: cells[key] for name, key in keys.items() if key in cells}
        layout = f"`{strategy}` on {ranks}{f' x {accumulate}' if accumulate > 1 else ''}"
        groups.setdefault(_exceptions(row, reasons) or "all exact", []).append(layout)
    table = [f"| {not_exact} | {'; '.join(layouts)} |" for not_exact, layouts in groups.items()]
    exact = [cell.max_relative_error or 0.0 for cell in cells.values() if cell.verdict == "exact"]
    days = [cell.date for cell in cells.values()]
    return PAGE.format(
        steps=next(iter(EXPERIMENTS.values())).steps,
        tolerance=TOLERANCE,
        models="; ".join(map(" ".join, zip(ascii_lowercase, EXPERIMENTS, strict=False))),
        exact=len(exact),
        largest=max(exact),
        table="\n".join(["| not exact | strategies |", "|---|---|", *table]),
        notes="\n".join(
            f"{number}. {reason}" for number, reason in enumerate(reasons.values(), start=1)
        ),
        date=f"{min(days)} to {max(days)}",
        python=platform.python_version(),
        torch=torch.__version__,
        shoal=shoal.__version__,
    )


def _exceptions(row: Mapping[str, Cell], reasons: dict[str, str]) -> str:
    """Return the models of a layout that are not exact, and append new reasons to `reasons`.

    Reasons are first clauses, which say the cause; those that differ in numbers count as one.
    """
    models: dict[str, str] = {}
    for name, cell in row.items():
        if cell.verdict == "exact":
            continue
        numbers = []
        for text in cell.reasons:
            reason = clause(text)
            kind = re.sub(r"\d+", "", reason)
            reasons.setdefault(kind, reason)
            numbers.append(str([*reasons].index(kind) + 1))
        word = {"differs by design": "by design", "differs": "DIFFERS"}.get(cell.verdict, "refused")
        verdict = f"{word} ({', '.join(numbers)})"
        models[verdict] = models.get(verdict, "") + ascii_lowercase[[*EXPERIMENTS].index(name)]
    return "; ".join(f"{letters} {verdict}" for verdict, letters in models.items())


if __name__ == "__main__":
    main()
