"""What the command line calls in every rank. Importing this module imports no torch; the ranks
do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from shoal.config.job import Job


def train(job: Job) -> None:
    """Train `job`. Collective. Raises SystemExit(75) when it was told to stop and has saved."""
    from shoal.train.loop import train as train_here

    train_here(job)


def evaluate_run(directory: Path, which: Literal["latest", "best"], as_json: bool) -> None:
    """Evaluate a run's checkpoint and print what was found, on rank 0. Collective."""
    from shoal.train.console import measures
    from shoal.train.evaluation import evaluate_run as evaluate_here

    rank, found = evaluate_here(directory, which)
    if rank == 0:
        print(
            json.dumps(found)
            if as_json
            else "  ".join([*measures(found), f"{found['samples']} samples"])
        )
