"""`--slurm` of `launch` and `train`: check, render, submit."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli import cluster_options, execution
from shoal.errors import UsageError
from shoal.launch.slurm import batch_script, slurm_job
from shoal.launch.slurm.batch_script import ClusterWork, SlurmOptions, default_name

if TYPE_CHECKING:
    from shoal.strategies import StrategyLine

REQUEUES = 20
"""Requeues of a job that was stopped and has saved: a limit for one that never gets further."""

SERVER_DIRECTORY = "SHOAL_SERVER_DIRECTORY"

Work = Callable[[int, list[str]], ClusterWork]
"""Makes the work for so many ranks. It adds a line to the list for each thing that is wrong."""


def submit(options: argparse.Namespace, make_work: Work) -> int:
    """Run the command's work on a cluster, and return the exit code.

    Args:
        options: of the command, with those of `cluster_options`.
        make_work: the verb's part.

    Raises:
        UsageError: something is wrong, in any part; nothing was submitted.
    """
    info = execution.rank_info(None)
    if info.world > 1:
        raise UsageError(
            f"a job is submitted once, but here it is one of {info.world}: {info.reason}"
        )
    problems = []
    if options.processes is not None:
        problems.append(
            f"-n {options.processes}: it counts processes of this machine. With --slurm give "
            "--nodes and --ntasks-per-node"
        )
    numbers = {
        name: cluster_options.number(options, name, default, low, problems)
        for name, default, low in (
            ("nodes", 1, 1),
            ("ntasks-per-node", 1, 1),
            ("cpus-per-task", None, 1),
            ("requeues", REQUEUES, 0),
        )
    }
    work = make_work((numbers["nodes"] or 1) * (numbers["ntasks-per-node"] or 1), problems)
    settings = SlurmOptions(
        nodes=numbers["nodes"] or 1,
        ranks_per_node=numbers["ntasks-per-node"] or 1,
        cpus_per_task=numbers["cpus-per-task"],
        time=options.time,
        partition=options.partition,
        account=options.account,
        gres=options.gres,
        job_name=options.job_name or default_name(work.name),
        more=tuple(options.sbatch_option),
        requeues=numbers["requeues"] or 0,
    )
    problems += settings.problems()
    if not options.dry_run:
        problems += slurm_job.missing_commands()
    if problems:
        raise UsageError("\n  ".join(problems))
    command = batch_script.remark(["shoal", *options.words])
    python = options.python or sys.executable
    script = batch_script.render(settings, work, python, os.getcwd(), command)
    if options.dry_run:
        print(script, end="")
        return 0

    def send() -> tuple[str, Path]:
        job = slurm_job.submit(script)
        return job, Path(batch_script.log_name(settings, job))

    return slurm_job.follow(send)


def server_variables(
    options: argparse.Namespace, line: StrategyLine | None, problems: list[str]
) -> dict[str, str]:
    """Return the variables by which parameter servers on several machines find their key.

    Args:
        options: of the command.
        line: its strategies, as far as the command knows them.
        problems: gets a line if the machines would not find the key.
    """
    has_servers = line is not None and any(spec.name == "server" for spec in line.specs)
    if not has_servers or options.nodes in (None, "1"):
        return {}
    if directory := os.environ.get(SERVER_DIRECTORY):
        return {SERVER_DIRECTORY: directory}
    problems.append(
        f"strategy server on several machines: they read the servers' key from a file. Set "
        f"{SERVER_DIRECTORY} to a directory that all of them share"
    )
    return {}
