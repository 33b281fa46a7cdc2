"""Functions that the command line runs in every rank.

Importing this module does not import torch, so that a launcher on a login node stays light.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from shoal.config.job import Job


def train(job: Job) -> None:
    """Train `job`. Collective. Raise SystemExit(75) after a request to stop and a save."""
    from shoal.train.loop import train as train_here

    train_here(job)


def evaluate_run(directory: Path, which: Literal["latest", "best"], as_json: bool) -> None:
    """Evaluate a run's checkpoint, and print the results on rank 0. Collective."""
    from shoal.train.console import measures
    from shoal.train.evaluation import evaluate_run as evaluate_here

    rank, report = evaluate_here(directory, which)
    if rank != 0:
        return
    if as_json:
        print(json.dumps(report))
    else:
        print("  ".join([*measures(report), f"{report['samples']} samples"]))
