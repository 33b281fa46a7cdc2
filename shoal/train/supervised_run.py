"""`shoal train -n N`: a job on ranks of this machine, restarted after a lost rank or a scaling."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from shoal.config.job import Job
from shoal.launch.control_channel import ControlServer
from shoal.launch.job_spec import JobSpec
from shoal.launch.preload import TRAINING
from shoal.launch.restarting import run_with_restarts
from shoal.platform.files import make_private_directory
from shoal.strategies import StrategyLine
from shoal.strategies.precheck import check_job
from shoal.train import entry
from shoal.train.run_directory import CONFIG, last_saved
from shoal.watchdog import hang_limit

RESTARTS = 3
"""Restarts after a lost rank, unless `--restarts` says otherwise."""
PRELOAD = (*TRAINING, "torch.distributed.checkpoint", "shoal.train.loop")


def train(
    job: Job,
    line: StrategyLine,
    processes: int,
    restarts: int = RESTARTS,
    hang_limit_s: float = hang_limit.DEFAULT_S,
) -> int:
    """Train `job` by the strategies of `line` on `processes` ranks. For the main thread.

    Args:
        restarts: the most restarts after a lost rank.
        hang_limit_s: a rank that does not come for so long is lost; 0 for no limit.

    Returns: the exit code, as `shoal.launch.restarting.run_with_restarts` returns it.
    """
    directory = Path(job.directory)
    # A restart resumes, also under `checkpoint.resume=false`: that is about older runs.
    resumed = replace(job, checkpoint=replace(job.checkpoint, resume=True))
    check = partial(check_job, job, line)
    saved_step = partial(last_saved, directory)
    with ControlServer(directory, CONFIG) as control, _server_directory() as folder:
        environment = {
            "SHOAL_SERVER_DIRECTORY": folder,
            hang_limit.VARIABLE: f"{hang_limit_s:g}",
        }
        spec = JobSpec(entry.train, (job,), (resumed,), check, saved_step, environment, PRELOAD)
        return run_with_restarts(spec, processes, control, restarts)


@contextmanager
def _server_directory() -> Iterator[str]:
    """Make a directory for the key of parameter servers.

    This process removes it in the end: a rank that is killed could not.
    """
    parent = os.environ.get("SHOAL_SERVER_DIRECTORY")
    directory = make_private_directory("shoal-run-", parent)
    try:
        yield str(directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
