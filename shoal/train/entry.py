"""Functions that the command line runs in every rank.

Importing this module does not import torch, so that a launcher on a login node stays light.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Literal

from shoal.config.job import Job


def train(job: Job) -> None:
    """Train `job`. Collective. Raise SystemExit(75) after a request to stop and a save."""
    from shoal.train.loop import train as train_here

    train_here(job)


def train_settings(settings: str) -> None:
    """Train the job whose settings are the YAML text `settings`. As `train`, for another host."""
    from shoal.config import read

    with tempfile.TemporaryDirectory(prefix="shoal-") as directory:
        path = Path(directory, "config.yaml")
        path.write_text(settings)
        job = read(path).job
    train(job)


def last_saved(directory: str, fast_dir: str | None) -> int | None:
    """Return the step of a run's newest checkpoint; None if there is none.

    Args:
        directory: of the run.
        fast_dir: the setting `checkpoint.fast_dir`.
    """
    from shoal.train.run_directory import fast_directory
    from shoal.train.run_directory import last_saved as last_saved_here

    return last_saved_here(Path(directory), fast_directory(directory, fast_dir))


def evaluate_run(directory: Path, which: Literal["latest", "best"], as_json: bool) -> None:
    """Evaluate a run's checkpoint, and print the results on rank 0. Collective."""
    from shoal.train.evaluation import evaluate_run as evaluate_here

    _print_report(*evaluate_here(directory, which), as_json)


def evaluate_weights(job: Job, as_json: bool) -> None:
    """Evaluate the weights that `job` starts from, and print the results on rank 0. Collective."""
    from shoal.train.evaluation import evaluate_weights as evaluate_here

    _print_report(*evaluate_here(job), as_json)


def _print_report(rank: int, report: dict[str, float | int], as_json: bool) -> None:
    from shoal.train.console import measures

    if rank != 0:
        return
    if as_json:
        print(json.dumps(report))
    else:
        print("  ".join([*measures(report), f"{report['samples']} samples"]))
