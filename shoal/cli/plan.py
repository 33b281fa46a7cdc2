"""`shoal plan`: predict which strategy is fastest, whether it fits, and why others do not."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from shoal.cli import argument_types, job_options
from shoal.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from shoal.costs.cluster import Cluster
    from shoal.costs.machine import Machine

HELP = "predict the fastest strategy of a job, its memory and its time, without running it"
EXAMPLES = """\
  shoal plan digits -n 2                          all strategies on two processes, best first
  shoal plan my.yaml -n 8 --memory 16GiB          what fits into 16 GiB a process
  shoal plan digits -n 2 --strategy zero3         one plan in detail: memory by kind, time by task
  shoal plan my.yaml --cluster cluster.yaml       on hosts and links of a file
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
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Print the plans. Exit status 1 if nothing fits."""
    from shoal.costs import cluster as clusters

    problems: list[str] = []
    memory = None
    if options.memory is not None:
        try:
            memory = clusters.read_size(options.memory)
        except ValueError as error:
            problems.append(f"--memory {options.memory}: {error}, as in 16GiB")
    try:
        cluster = clusters.load(options.cluster) if options.cluster is not None else None
        machine = _machine(options.machine or (cluster.machine if cluster else ""))
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    ranks = options.processes or 1
    if cluster is None:
        cluster = one_machine(machine, ranks)
    elif options.processes is not None:
        raise UsageError("-n and --cluster: the file says how many ranks there are. Leave out -n.")
    settings, _, _ = job_options.settings(options, cluster.ranks)
    from shoal.train import job_precheck

    if problems := job_precheck.problems(settings.job):
        raise ConfigError(problems)
    return _print_plans(options, cluster, machine, memory)


def _print_plans(
    options: argparse.Namespace, cluster: Cluster, machine: Machine, memory: float | None
) -> int:
    from shoal.planner import plan_report
    from shoal.planner.job_workload import job_workload
    from shoal.planner.strategy_search import Planner

    settings, line, _ = job_options.settings(options, cluster.ranks)
    planner = Planner(job_workload(settings.job), machine, cluster, memory)
    asked = any(name == "strategy" for name, _ in options.settings) or options.allreduce
    if asked and not options.json:
        plan = planner.plan(line.text)
        print(plan_report.explain(planner, plan))
        return int(plan.missing_bytes > 0)
    plans = planner.search([line.text] if asked else None)
    if options.json:
        print(json.dumps(plan_report.as_json(planner, plans)))
    else:
        words = " ".join(
            [*options.source, *(f"--{name} {text}" for name, text in options.settings)]
        )
        print(plan_report.report(planner, plans, f"shoal train {words} -n {cluster.ranks}"))
    return int(not plans.fitting)


def _machine(asked: str) -> Machine:
    """Return the machine that was asked for, or the calibration of this one.

    Raises: ConfigError: there is none.
    """
    from pathlib import Path

    from shoal.costs import machine as machines
    from shoal.errors import did_you_mean

    if asked in machines.PRESETS:
        return machines.PRESETS[asked]
    if asked:
        if not Path(asked).is_file():
            known = did_you_mean(asked, machines.PRESETS)
            raise ConfigError([f"--machine {asked}: is neither a preset nor a file; {known}"])
        return machines.load(Path(asked))
    path = machines.default_path()
    if not path.is_file():
        return machines.UNKNOWN_CPU
    return machines.load(path)


def one_machine(machine: Machine, ranks: int) -> Cluster:
    """Return a cluster of one host. Ranks on a CPU share its memory; each GPU has its own."""
    from shoal.costs.cluster import Cluster as ClusterOfHosts
    from shoal.costs.cluster import Host, Link, one_host

    if machine.device == "cpu":
        return one_host(ranks, machine.memory_bytes)
    inside = Link(machine.server_rate)
    return ClusterOfHosts((Host("one", ranks, machine.memory_bytes, inside, inside),), {})
