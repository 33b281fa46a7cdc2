"""Runs that lose a rank at a call foretold, and what they leave when they are left alone."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_jobs

from shoal import cli
from shoal.config import to_yaml
from shoal.config.job import Job
from shoal.testing import world

SERVERS = "server=2,part_mb=0.0001,lease_s=0.5"
Undisturbed = Callable[[str], tuple[dict[str, Any], list[dict[str, int]]]]


def undisturbed_runs(
    folders: pytest.TempPathFactory, mortal: Callable[[Path, str], Job]
) -> Undisturbed:
    """Return, by strategy, what a run that is left alone leaves, and how many calls each of its
    ranks makes in each part.
    """

    @functools.cache
    def of(strategy: str) -> tuple[dict[str, Any], list[dict[str, int]]]:
        folder = folders.mktemp("undisturbed")
        calls = world.run(2, tiny_jobs.counts_calls, mortal(folder, strategy))
        return tiny_jobs.everything(folder / "run"), calls

    return of


def command(job: Job, folder: Path, *words: str) -> int:
    """Return the exit code of `shoal train JOB -n 2`."""
    (folder / "job.yaml").write_text(to_yaml(job))
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", str(folder / "job.yaml"), "-n", "2", *words])
    assert isinstance(stop.value.code, int)
    return stop.value.code


def foretell(folder: Path, rank: int, **fate: object) -> None:
    """Say when a rank is to be killed."""
    (folder / f"fate.{rank}").write_text(json.dumps(fate))
