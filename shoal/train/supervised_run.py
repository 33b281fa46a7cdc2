"""`shoal train -n N`: a job on ranks of this machine, which goes on when a rank is lost and
when it is scaled.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

from shoal.config.job import Job
from shoal.launch.control_server import ControlServer
from shoal.launch.job_spec import JobSpec
from shoal.launch.preload import TRAINING
from shoal.launch.restarting import run_with_restarts
from shoal.strategies import StrategyLine
from shoal.strategies.precheck import check_job
from shoal.train import entry
from shoal.train.run_directory import CONFIG, last_saved

RESTARTS = 3
PRELOAD = (*TRAINING, "torch.distributed.checkpoint", "shoal.train.loop")


def train(job: Job, line: StrategyLine, processes: int, restarts: int = RESTARTS) -> int:
    """Train `job` by the strategies of `line` on `processes` ranks of this machine. Main thread
    only.

    Returns: the exit code, as `shoal.launch.local.run`.
    """
    directory = Path(job.directory)
    # What this very command has saved belongs to it, whatever it was told about older runs.
    again = replace(job, checkpoint=replace(job.checkpoint, resume=True))
    objections, saved_step = partial(check_job, job, line), partial(last_saved, directory)
    with ControlServer(directory, CONFIG) as control, _server_directory() as folder:
        environment = {"SHOAL_SERVER_DIRECTORY": folder}
        work = JobSpec(entry.train, (job,), (again,), objections, saved_step, environment, PRELOAD)
        return run_with_restarts(work, processes, control, restarts)


def _server_directory() -> tempfile.TemporaryDirectory[str]:
    """Where servers keep their key: a rank that is killed cannot remove it."""
    around = os.environ.get("SHOAL_SERVER_DIRECTORY")
    return tempfile.TemporaryDirectory(prefix="shoal-run-", dir=around, ignore_cleanup_errors=True)
