"""`shoal train -n N` and `--hosts`: a job on ranks, restarted after a loss or a scaling."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from shoal.config import to_yaml
from shoal.config.job import Job
from shoal.launch.control_channel import ControlServer
from shoal.launch.hosts.host_facts import FactsRequest
from shoal.launch.hosts.hosts_job import run_on_hosts_with_restarts
from shoal.launch.hosts.remote_work import HostsOptions, RemoteWork
from shoal.launch.job_spec import JobSpec
from shoal.launch.preload import TRAINING
from shoal.launch.restarting import run_with_restarts
from shoal.platform.files import make_private_directory
from shoal.strategies import StrategyLine
from shoal.strategies.precheck import check_job
from shoal.train import entry
from shoal.train.run_directory import CONFIG
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
    # A restart resumes, also under `checkpoint.resume=false`: that is about older runs.
    resumed = replace(job, checkpoint=replace(job.checkpoint, resume=True))
    check = partial(check_job, job, line)
    environment = {hang_limit.VARIABLE: f"{hang_limit_s:g}"}
    saved_step = partial(entry.last_saved, job.directory, job.checkpoint.fast_dir)
    with (
        ControlServer(Path(job.directory), CONFIG) as control,
        _server_directory() as folder,
    ):
        environment["SHOAL_SERVER_DIRECTORY"] = folder
        spec = JobSpec(entry.train, (job,), (resumed,), check, saved_step, environment, PRELOAD)
        return run_with_restarts(spec, processes, control, restarts)


def train_on_hosts(
    job: Job,
    line: StrategyLine,
    hosts: HostsOptions,
    directory: str,
    restarts: int = RESTARTS,
    hang_limit_s: float = hang_limit.DEFAULT_S,
) -> int:
    """Train `job` on ranks of several hosts. For the main thread.

    Args:
        directory: the working directory, which all hosts have.
        hang_limit_s: as for `train`.

    Returns: the exit code, as `train`.
    """
    resumed = replace(job, checkpoint=replace(job.checkpoint, resume=True))
    work = RemoteWork(
        target="shoal.train.entry:train_settings",
        arguments=[to_yaml(job)],
        again=[to_yaml(resumed)],
        environment={hang_limit.VARIABLE: f"{hang_limit_s:g}"},
        output="first",
        preload=PRELOAD,
        request=FactsRequest(directory, run_directory=job.directory),
        saved_step=("shoal.train.entry:last_saved", [job.directory, job.checkpoint.fast_dir]),
        problems=partial(check_job, job, line),
    )
    with ControlServer(Path(job.directory), CONFIG) as control:
        return run_on_hosts_with_restarts(hosts, work, control, restarts)


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
