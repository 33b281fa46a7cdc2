"""A job from the command line: on ranks of this machine or of hosts, and in each of these ranks.

Importing this module does not import torch, so that a launcher on a login node stays light.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from shoal.config import read, to_yaml
from shoal.config.job import Job
from shoal.launch.control_channel import ControlServer
from shoal.launch.hosts.host_facts import FactsRequest
from shoal.launch.hosts.hosts_job import HostsOptions, run_on_hosts
from shoal.launch.preload import TRAINING
from shoal.launch.restarting import RestartingRun, Work
from shoal.platform.files import make_private_directory
from shoal.strategies import StrategyLine
from shoal.strategies.precheck import check_job
from shoal.train.console import envelope, measures
from shoal.train.run_directory import CONFIG
from shoal.watchdog import hang_limit

RESTARTS = 3
"""Restarts after a lost rank, unless `--restarts` says otherwise."""
PRELOAD = (*TRAINING, "torch.distributed.checkpoint", "shoal.train.loop")


def train_on_ranks(
    job: Job,
    line: StrategyLine,
    where: int | HostsOptions,
    restarts: int = RESTARTS,
    hang_limit_s: float = hang_limit.DEFAULT_S,
) -> int:
    """Train `job` by the strategies of `line`. For the main thread.

    Args:
        where: so many ranks on this machine, or those of several hosts, which all have this
            working directory.
        restarts: the most restarts after a lost rank.
        hang_limit_s: a rank that does not come for so long is lost; 0 for no limit.

    Returns: the exit code, as `RestartingRun.run` returns it.
    """
    with ControlServer(Path(job.directory), CONFIG) as control:
        if isinstance(where, HostsOptions):
            request = FactsRequest(os.getcwd(), run_directory=job.directory)
            work = _work(job, line, hang_limit_s)
            return run_on_hosts(where, work, request, control, restarts)
        # For the key of parameter servers. A rank that is killed could not remove it.
        parent = os.environ.get("SHOAL_SERVER_DIRECTORY")
        folder = str(make_private_directory("shoal-run-", parent))
        try:
            work = _work(job, line, hang_limit_s, SHOAL_SERVER_DIRECTORY=folder)
            return RestartingRun(work, where, control, restarts).run()
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _work(job: Job, line: StrategyLine, hang_limit_s: float, **environment: str) -> Work:
    # A restart resumes, also under `checkpoint.resume=false`: that is about older runs.
    resumed = replace(job, checkpoint=replace(job.checkpoint, resume=True))
    return Work(
        target="shoal.train.entry:train_settings",
        arguments=[to_yaml(job)],
        again=[to_yaml(resumed)],
        environment={hang_limit.VARIABLE: f"{hang_limit_s:g}", **environment},
        output="first",
        preload=PRELOAD,
        find_step=(
            "shoal.train.run_directory:last_saved",
            [job.directory, job.checkpoint.fast_dir],
        ),
        check=partial(check_job, job, line),
    )


def train(job: Job) -> None:
    """Train `job`. Collective. Raise SystemExit(75) after a request to stop and a save."""
    from shoal.train.loop import train as train_here

    train_here(job)


def train_settings(settings: str) -> None:
    """Train the job whose settings are the YAML text `settings`. As `train`."""
    with tempfile.TemporaryDirectory(prefix="shoal-") as directory:
        path = Path(directory, "config.yaml")
        path.write_text(settings)
        job = read(path).job
    train(job)


def evaluate(what: Path | Job, which: Any, strategy: str | None, as_json: bool) -> None:
    """Evaluate a run, or a job's own weights; print the result on rank 0. Collective.

    Args: which, strategy: as of `evaluation.evaluate_run`.
    """
    from shoal.train import evaluation

    if isinstance(what, Job):
        rank, report = evaluation.evaluate_weights(what)
    else:
        rank, report = evaluation.evaluate_run(what, which, strategy)
    if rank == 0:
        step = [f"step {report['step']}"] if "step" in report else []
        text = "  ".join([*step, *measures(report), f"{report['samples']} samples"])
        print(envelope("eval", True, result=report) if as_json else text)
