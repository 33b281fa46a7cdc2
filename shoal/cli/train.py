"""`shoal train`: train an experiment, or resume it.

    shoal train -n 4              this process starts 4 ranks and restarts them after a loss
    torchrun ... shoal train      this process is one of the ranks; torchrun restarts them
    shoal train --slurm           this process submits a job, whose ranks run `shoal train`
    shoal train                   this process trains alone

All checks that need no data are made before any process starts.
"""

from __future__ import annotations

import argparse
import os
import signal
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli import (
    answers,
    argument_types,
    cluster_options,
    job_options,
)
from shoal.errors import ShoalError, UsageError, headline_of, raise_problems
from shoal.train.console import warn
from shoal.watchdog.hang_limit import chosen_limit_s

EXIT_INTERRUPTED = 128 + signal.SIGINT

if TYPE_CHECKING:
    from shoal.config import Settings
    from shoal.config.job import Job
    from shoal.launch.batch_script import ClusterWork
    from shoal.launch.rank_info import RankInfo
    from shoal.strategies import StrategyLine

HELP = "train an experiment; the same command again resumes it"
EXAMPLES = """\
  shoal train digits -n 2                       a built-in experiment on two processes
  shoal train my.yaml --train.batch_size 512    a file of your own, with another setting
  shoal train digits -n 4 --strategy zero3      parameters in shards
  shoal train my.yaml --weights resnet18.pt     start from these weights
  shoal train digits --hosts a:2,b:2            two processes on each of two hosts, by ssh
  shoal train digits -n 2 --trace               the time of a step: shoal trace runs/digits
  shoal train digits --slurm --nodes 4          four nodes of a Slurm cluster
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    job_options.arguments(parser, shown=("strategy", "out"))
    parser.add_argument(
        "--weights",
        metavar="PATH",
        help="start from safetensors, or a state dict of torch",
    )
    job_options.trace_argument(parser)
    cluster_options.host_arguments(parser)
    parser.add_argument(
        "--record",
        action="store_true",
        help="with stale parameter servers: keep the order of pushes, for shoal replay",
    )
    parser.add_argument(
        "--restarts",
        type=argument_types.integer(0, 1_000_000),
        help="with -n, --hosts or --slurm: how often a run goes on by itself when a process "
        "was killed (default: 3)",
    )
    job_options.hang_limit_argument(parser, "with -n or --hosts: restart")
    cluster_options.arguments(parser)


def run(options: argparse.Namespace) -> int:
    from shoal.launch.environment import own_place

    if cluster_options.is_asked(options):
        if options.json:
            raise UsageError("--json: a job is only submitted here, without results. Leave it out")
        return cluster_options.submit(options, partial(_cluster_work, options))
    with answers.only_json() if options.json else nullcontext():
        info = own_place(options.processes)
        job, start = _prepared(options, info)
        code, error = _code_of(start, options.json)
        if code == EXIT_INTERRUPTED and info.rank == 0:
            warn(error := _describe_stop(job))
    if options.json and info.rank == 0:
        if code:
            answers.show_error("train", True, error or f"exit code {code}; stderr says why")
        else:
            answers.show(options, _result(job), "")
    return code


def _prepared(options: argparse.Namespace, info: RankInfo) -> tuple[Job, Callable[[], int]]:
    """Return the job, and what trains it and returns the exit code. All checks are made here."""
    from shoal.train.run_directory import check_usable, take_stop

    hosts = cluster_options.hosts_of(options)
    world = options.processes or info.world
    if hosts is not None:
        if info.launcher != "single":
            raise UsageError(
                f"--hosts starts ranks itself, but another launcher started this process: "
                f"{info.reason}. Leave --hosts out, or start one process"
            )
        world = options.processes = hosts.processes
    restarts = _restarts(options, info)
    if info.world > 1 and ("strategy", job_options.AUTO) in options.settings:
        raise UsageError(
            "--strategy auto: another launcher has started this process, and every rank would "
            "choose by itself. Use the line that `shoal plan` tells."
        )
    # Under another launcher every rank runs this function.
    settings, line = _settings(options, world, warn if info.rank == 0 else lambda _: None)
    raise_problems(_problems(settings, line, world))
    if hosts is not None:
        cluster_options.check_servers(hosts, line)
    if info.world == 1:
        # Only a check, so that it fails before processes start; rank 0 claims the directory.
        check_usable(settings.job)
        take_stop(settings.job.directory)
    limit_s = chosen_limit_s(options.hang_limit, os.environ, settings.job.train.hang_limit_s)
    from shoal.train import entry

    def start() -> int:
        if restarts is not None:
            return entry.train_on_ranks(settings.job, line, hosts or world, restarts, limit_s)
        entry.train(settings.job)
        return 0

    return settings.job, start


def _code_of(start: Callable[[], int], as_json: bool) -> tuple[int, str]:
    """Train; return the exit code and, for JSON, an exception's headline."""
    try:
        return start(), ""
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED, ""
    except SystemExit as stop:  # after a request to stop, and a save
        if not isinstance(stop.code, int):
            raise
        return stop.code, ""
    except Exception as error:
        if isinstance(error, ShoalError) or not as_json:
            raise
        traceback.print_exc()
        return 1, headline_of(error)


def _describe_stop(job: Job) -> str:
    """Return where a run was interrupted, what it has saved, and how it goes on."""
    from shoal.train.run_directory import last_saved, take_stop

    stopped, saved = take_stop(job.directory), last_saved(job.directory, job.checkpoint.fast_dir)
    where = "interrupted" if stopped is None else f"interrupted after step {stopped}"
    if saved is None:
        return f"{where}, before the first save; the same command begins again"
    return f"{where}; the newest save is of step {saved}, and the same command resumes there"


def _result(job: Job) -> dict[str, Any]:
    """Return what --json tells of a run that has ended."""
    from shoal.loggers.metrics_file import NAME, read_metrics
    from shoal.train.run_directory import last_saved

    records = read_metrics(Path(job.directory, NAME))[0]
    evaluated = [record for record in records if record.get("kind") == "validation"]
    return {
        "run": job.directory,
        "step": last_saved(job.directory, job.checkpoint.fast_dir),
        "validation": evaluated[-1] if evaluated else None,
    }


def _settings(
    options: argparse.Namespace, world: int, note: Callable[[str], None] = warn
) -> tuple[Settings, StrategyLine]:
    """Return the settings of the command, and its strategies. Args: note: prints a note.

    Raises:
        ConfigError: something in them is wrong.
        UsageError: the experiment is missing.
    """
    from shoal.strategies import check_recordable

    options.settings = list(options.settings)
    if options.record:
        options.settings.append(("train.record", "true"))
    if options.weights is not None:
        options.settings.append(("model.weights", options.weights))
    if options.trace is not None:
        options.settings.append(("log.trace", str(options.trace)))
    settings, line = job_options.settings(options, world, note)
    if settings.job.train.record:
        check_recordable(line)
    return settings, line


def _problems(
    settings: Settings, line: StrategyLine, world: int, on_machine: int | None = None
) -> list[str]:
    """Return a line for each thing that so many ranks cannot do, or that is not there."""
    from shoal.strategies.precheck import check_job
    from shoal.train import job_precheck

    found = check_job(settings.job, line, world, on_machine)
    return [*found, *job_precheck.problems(settings.job)]


def _cluster_work(options: argparse.Namespace, ranks: int, problems: list[str]) -> ClusterWork:
    from shoal.launch.batch_script import ClusterWork, default_name
    from shoal.train.run_directory import check_usable

    if ("strategy", job_options.AUTO) in options.settings:
        raise UsageError(
            "--strategy auto: every rank of the job would choose by itself. Use the line that "
            "`shoal plan --cluster FILE` tells"
        )
    settings, line = _settings(options, ranks)
    environment = cluster_options.server_variables(options, line, problems)
    problems += _problems(settings, line, ranks, options.ntasks_per_node or 1)
    check_usable(settings.job)
    words = cluster_options.without(options.words, ["--restarts"])
    return ClusterWork(
        name=default_name(settings.job.name),
        words=("-m", "shoal", *words),
        environment=environment,
        output=None,
        restarts=3 if options.restarts is None else options.restarts,
    )


def _restarts(options: argparse.Namespace, info: RankInfo) -> int | None:
    """Return how often this command may start its ranks again; None if it starts none."""
    given = options.restarts
    if info.world == 1 and options.processes is not None:
        from shoal.train.entry import RESTARTS

        return RESTARTS if given is None else given
    if given is not None:
        cure = "Use what that launcher has, or leave --restarts out"
        if info.world == 1:
            cure = "Give -n 1 as well"
        raise UsageError(
            f"--restarts {given}: this command starts no process ({info.reason}). {cure}."
        )
    return None
