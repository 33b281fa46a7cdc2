"""`shoal plan`: predict which strategy is fastest, whether it fits, and why others do not."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from shoal.cli import argument_types, job_options
from shoal.errors import ConfigError, raise_problems

if TYPE_CHECKING:
    from shoal.config.job import Job
    from shoal.costs.cluster import Cluster
    from shoal.costs.machine import Machine
    from shoal.strategies import StrategyLine

HELP = "predict the fastest strategy of a job, its memory and its time, without running it"
EXAMPLES = """\
  shoal plan digits -n 2                          all strategies on two processes, best first
  shoal plan my.yaml -n 8 --memory 16GiB          what fits into 16 GiB a process
  shoal plan digits -n 2 --strategy zero3         one plan in detail: memory by kind, time by task
  shoal plan my.yaml --cluster cluster.yaml       on hosts and links of a file
  shoal plan my.yaml -n 8 --servers               how many parameter servers
  shoal plan my.yaml -n 8 --mtbf 5000h            how often to save
  shoal plan my.yaml -n 8 --machine h100          on a machine known by its datasheet

Speeds are those of `shoal calibrate`; without one, it is asked for. docs/plan.md says how to read a
plan, and how far plans were from what was measured.
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    job_options.arguments(parser, "ranks of the plan (default: 1)")
    parser.add_argument("--memory", metavar="SIZE", help="of each rank, such as 16GiB")
    parser.add_argument(
        "--cluster", type=argument_types.path, metavar="FILE", help="YAML file of hosts and links"
    )
    parser.add_argument(
        "--machine", metavar="NAME_OR_FILE", help="a preset, or a file of shoal calibrate"
    )
    parser.add_argument(
        "--servers", action="store_true", help="how many parameter servers, by the closed form"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    failures = parser.add_argument_group("failures", "how often to save, and what is lost")
    failures.add_argument("--mtbf", metavar="TIME", help="between failures of one rank: 50000h")
    failures.add_argument("--save", metavar="TIME", help="that a save takes (default: 60s)")
    failures.add_argument("--restart", metavar="TIME", help="that a restart takes (default: 60s)")


class _Numbers(NamedTuple):
    """Quantities of the command line, in bytes and seconds; None where they were not given."""

    memory: float | None
    mtbf: float | None
    save: float
    restart: float


def run(options: argparse.Namespace) -> int:
    """Print the plans. Exit status 1 if nothing fits.

    Raises: ConfigError: with all problems of the options, the files and the job.
    """
    from shoal.costs import cluster as clusters
    from shoal.costs.find_machine import find_machine, one_machine
    from shoal.train import job_precheck

    problems: list[str] = []
    numbers = _numbers(options, problems)
    cluster, machine = None, None
    try:
        cluster = clusters.load(options.cluster) if options.cluster is not None else None
        machine = find_machine(options.machine or (cluster.machine if cluster else ""))
    except ConfigError as error:
        problems += error.problems
    processes = 1 if options.processes is None else options.processes
    if processes < 1:
        problems.append(f"-n {processes}: there must be at least one process")
    if options.cluster is not None and options.processes is not None:
        problems.append("-n and --cluster: the file says how many ranks there are. Leave out -n.")
    ranks = cluster.ranks if cluster is not None else max(processes, 1)
    try:
        settings, line, _ = job_options.settings(options, ranks)
        problems += job_precheck.problems(settings.job)
    except ConfigError as error:
        problems += error.problems
    raise_problems(problems)
    assert machine is not None
    cluster = cluster or one_machine(machine, ranks)
    return _print_plans(options, settings.job, line, cluster, machine, numbers)


def _numbers(options: argparse.Namespace, problems: list[str]) -> _Numbers:
    from shoal.costs import cluster as clusters

    def read(name: str, parse: Callable[[str], float], example: str) -> float | None:
        text = getattr(options, name)
        if text is None:
            return None
        try:
            return parse(text)
        except ValueError as error:
            problems.append(f"--{name} {text}: {error}, as in {example}")
            return None

    return _Numbers(
        read("memory", clusters.read_size, "16GiB"),
        read("mtbf", clusters.read_time, "50000h"),
        read("save", clusters.read_time, "60s") or 60.0,
        read("restart", clusters.read_time, "5min") or 60.0,
    )


def _print_plans(
    options: argparse.Namespace,
    job: Job,
    line: StrategyLine,
    cluster: Cluster,
    machine: Machine,
    numbers: _Numbers,
) -> int:
    from shoal.planner import plan_report, server_report
    from shoal.planner.job_workload import job_workload
    from shoal.planner.strategy_search import Planner

    planner = Planner(job_workload(job), machine, cluster, numbers.memory)
    if options.servers:
        print(server_report.servers_text(planner))
        return 0
    asked = any(name == "strategy" for name, _ in options.settings) or options.allreduce
    if asked and not options.json:
        plan = planner.plan(line.text)
        print(plan_report.explain(planner, plan))
        return int(plan.missing_bytes > 0)
    plans = planner.search([line.text] if asked else None)
    if options.json:
        print(json.dumps(plan_report.as_json(planner, plans)))
        return int(not plans.fitting)
    words = " ".join([*options.source, *(f"--{name} {text}" for name, text in options.settings)])
    print(plan_report.report(planner, plans, f"shoal train {words} -n {cluster.ranks}"))
    mtbf_s = numbers.mtbf or cluster.mtbf_s
    if mtbf_s < inf:
        step_s = plans.best.seconds if plans.best else inf
        save_s, restart_s = numbers.save, numbers.restart
        print(server_report.failures_text(mtbf_s, cluster.ranks, save_s, restart_s, step_s))
    return int(not plans.fitting)
