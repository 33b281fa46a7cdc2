"""`shoal plan`: predict which strategy is fastest, whether it fits, and why others do not."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shoal.cli import answers, argument_types, job_options
from shoal.costs.cluster import read_size, read_time
from shoal.errors import ConfigError, UsageError, raise_problems
from shoal.launch.output import print_note
from shoal.train.console import envelope

if TYPE_CHECKING:
    from shoal.costs.cluster import Cluster
    from shoal.costs.machine import Machine
    from shoal.planner.smallest_change import Command
    from shoal.planner.strategy_search import Plan, Workload

HELP = "predict the fastest strategy of a job, its memory and its time, without running it"
EXAMPLES = """\
  shoal plan digits -n 2                          all strategies on two processes, best first
  shoal plan my.yaml -n 8 --memory 16GiB          what fits into 16 GiB a process
  shoal plan digits -n 2 --strategy zero3         one plan in detail: memory by kind, time by task
  shoal plan my.yaml --cluster cluster.yaml       on hosts and links of a file
  shoal plan my.yaml -n 8 --servers               how many parameter servers
  shoal plan my.yaml -n 8 --mtbf 5000h            how often to save
  shoal plan my.yaml -n 8 --machine h100          on a machine known by its datasheet
  shoal plan train.py -n 4 --memory 16GiB         your own script; its own words after --
  shoal plan digits -n 2 -o plan.png              timeline and memory as a picture
  shoal plan runs/digits                          beside the trace of a run, term by term
  shoal plan hf:llama-70b -n 64 --seq 4096        a config.json of transformers, without weights

docs/plan.md says how to read a plan. Its speeds are those of `shoal calibrate`.
"""
HUB = "hf:"
HUB_SETTINGS = ("strategy", "train.batch_size", "train.accumulate", "train.precision", "optimizer.")


def arguments(parser: argparse.ArgumentParser) -> None:
    names = "experiment, YAML file, script, hf:DIRECTORY or a run"
    job_options.arguments(parser, "ranks of the plan (default: 1)", source=names)
    size = argument_types.quantity(read_size, ", as in 16GiB")
    parser.add_argument("--memory", type=size, metavar="SIZE", help="memory of a rank, as in 16GiB")
    parser.add_argument(
        "--cluster", type=argument_types.path, metavar="FILE", help="YAML file of hosts and links"
    )
    parser.add_argument(
        "--machine", metavar="NAME_OR_FILE", help="a preset, or a file of shoal calibrate"
    )
    parser.add_argument(
        "--servers", action="store_true", help="how many parameter servers, by the closed form"
    )
    parser.add_argument(
        "--seq",
        type=argument_types.integer(1, 1 << 24),
        help="hf: tokens of a sample (default: 2048, or what the model has)",
    )
    parser.add_argument(
        "--recalibrate",
        action="store_true",
        help="take over the speeds that a traced run shows",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=argument_types.path,
        metavar="FILE",
        help=".png or .svg: the timeline and the memory of the plan",
    )
    failures = parser.add_argument_group("how often to save, and what failures cost")
    for name, default, help in (
        ("mtbf", None, "mean time between failures of one rank: 50000h"),
        ("save", 60.0, "time of a save (default: 60s)"),
        ("restart", 60.0, "time of a restart (default: 60s)"),
    ):
        kind = argument_types.quantity(read_time, ", as in 50000h or 60s")
        failures.add_argument(f"--{name}", type=kind, default=default, metavar="TIME", help=help)


class _Request(NamedTuple):
    """Request for a plan, whatever is planned.

    Attributes:
        command: that trains what is planned.
        strategy: the one that was asked for; None for all.
    """

    machine: Machine
    cluster: Cluster
    options: argparse.Namespace
    command: Command | None = None
    strategy: str | None = None


Answer = Callable[[], tuple[str, int]]
"""Returns the text of the plans, and the exit status."""


def run(options: argparse.Namespace) -> int:
    """Print the plans. Exit status 1 if nothing fits.

    Raises: ConfigError: with all problems of the options, the files and the job.
    """
    problems: list[str] = []
    request = _request(options, problems)
    if options.output is not None:
        from shoal.plotting.curves import check_can_draw

        check_can_draw(options.output)
    word = options.source[0] if len(options.source) == 1 else ""
    try:
        if options.script_arguments and not word.endswith(".py"):
            problems.append("words after --: only for a script, as in `shoal plan train.py -- ...`")
        if options.seq is not None and not word.startswith(HUB):
            problems.append("--seq: only for hf:DIRECTORY; others have samples of their own")
        if word.endswith(".py"):
            answer = _of_script(request)
        elif word.startswith(HUB):
            answer = _of_hub(request)
        elif Path(word).is_dir() and word:
            return _compare_with_trace(request, problems)
        else:
            answer = _of_job(request)
        if options.recalibrate:
            problems.append("--recalibrate: takes a traced run, as in `shoal plan runs/digits`")
    except ConfigError as error:
        problems += error.problems
    except UsageError as error:
        problems.append(str(error))
    raise_problems(problems)
    text, status = answer()
    print(text)
    return status


def _request(options: argparse.Namespace, problems: list[str]) -> _Request:
    """Return what the options ask for, whatever is planned; add their problems."""
    from shoal.costs import cluster as clusters
    from shoal.costs.machine import UNKNOWN_CPU
    from shoal.planner.find_machine import find_machine, one_machine

    cluster, machine = None, UNKNOWN_CPU
    try:
        cluster = clusters.load(options.cluster) if options.cluster is not None else None
        on_host = cluster.ranks_per_host if cluster else options.processes or 1
        machine = find_machine(options.machine or (cluster.machine if cluster else ""), on_host)
    except ConfigError as error:
        problems += error.problems
    if options.cluster is not None and options.processes is not None:
        problems.append("-n and --cluster: the file says how many ranks there are. Leave out -n.")
    cluster = cluster or one_machine(machine, options.processes or 1)
    return _Request(machine, cluster, options)


def _of_job(request: _Request) -> Answer:
    from shoal.planner.job_workload import job_workload, with_samples
    from shoal.planner.smallest_change import Command
    from shoal.train import job_precheck

    options = request.options
    settings, line = job_options.settings(options, request.cluster.ranks)
    job, note = with_samples(settings.job)
    raise_problems(job_precheck.problems(job))
    if note:
        print_note(note)
    words = [f"--{name}={text}" for name, text in options.settings if name != "strategy"]
    asked = any(name == "strategy" for name, _ in options.settings)
    request = request._replace(
        command=Command(("shoal", "train", *options.source, *words), (), "--train.accumulate"),
        strategy=line.text if asked else None,
    )
    return lambda: _plans(job_workload(job), request)


def _of_hub(request: _Request) -> Answer:
    from shoal import config
    from shoal.integrations.hub_config import config_workload
    from shoal.planner.smallest_change import Command

    options = request.options
    others = [name for name, _ in options.settings if not name.startswith(HUB_SETTINGS)]
    if others:
        raise UsageError(
            f"--{others[0]}: no setting of a model of transformers; those are --strategy, "
            "--train.batch_size, --train.accumulate, --train.precision and --optimizer..."
        )
    flags = [("optimizer.name", "AdamW"), ("optimizer.lr", "1e-4"), *options.settings]
    job = config.read(None, flags).job
    asked = any(name == "strategy" for name, _ in options.settings)
    request = request._replace(
        command=Command(words=("train.py",)), strategy=job.strategy if asked else None
    )
    place = options.source[0].removeprefix(HUB)
    return lambda: _plans(config_workload(place, job, options.seq or 0), request)


def _compare_with_trace(request: _Request, problems: list[str]) -> int:
    """Print the plan of a traced run beside its trace."""
    from shoal.costs.machine import default_path
    from shoal.planner.find_machine import cpu_of_this_machine, one_machine
    from shoal.planner.job_workload import job_workload
    from shoal.planner.plan_report import machine_text
    from shoal.planner.strategy_search import Planner
    from shoal.planner.trace_comparison import comparison_lines, recalibrated
    from shoal.trace import chrome
    from shoal.train.run_directory import job_of

    options = request.options
    name = options.source[0]
    is_named = options.machine or request.cluster.machine
    machine = request.machine if is_named else cpu_of_this_machine()  # no run on GPUs has a trace
    given = [key for key in ("processes", "servers", "json", "output") if getattr(options, key)]
    given += [key for key, _ in options.settings]
    if given:
        problems.append(f"--{given[0]}: a run is compared as it was. Leave it out.")
    if options.recalibrate and not machine.calibrated:
        problems.append("--recalibrate: nothing was calibrated yet. Run `shoal calibrate` first.")
    raise_problems(problems)
    trace, job = chrome.read(Path(name)), job_of(Path(name))
    cluster = request.cluster
    if options.cluster is None:
        cluster = one_machine(machine, len(trace.spans))
    planner = Planner(job_workload(job), machine, cluster, inf)
    print(f"{name}: {job.strategy} on {len(trace.spans)} ranks; {machine_text(machine)}\n")
    plan = planner.plan(job.strategy)
    print("\n".join(comparison_lines(plan, trace.spans)))
    if options.recalibrate:
        path = Path(options.machine) if options.machine else default_path()
        recalibrated(machine, cluster.ranks_per_host, plan, trace.spans).save(path)
        print(f"{path}: the speeds of computing and of messages are now those of {name}")
    return 0


def _of_script(request: _Request) -> Answer:
    """Check a script. What is returned raises UsageError if it cannot be followed."""
    from shoal.planner.script_workload import plan_in_script
    from shoal.planner.smallest_change import Command

    options = request.options
    name = options.source[0]
    strategy = job_options.script_strategy(options)
    words = (name, *options.script_arguments)
    request = request._replace(command=Command(words=words), strategy=strategy)
    answers.tell_start(f"following {name} to its first backward pass, without memory for weights")
    return lambda: plan_in_script(words, request.cluster.ranks, _plans, request)


def _plans(workload: Workload, request: _Request) -> tuple[str, int]:
    """Return the text of the plans, and the exit status."""
    from shoal.planner import plan_report
    from shoal.planner.strategy_search import Planner

    options = request.options
    planner = Planner(workload, request.machine, request.cluster, options.memory)
    as_json, output, command = options.json, options.output, request.command
    assert command is not None
    if options.servers:
        text = "\n".join(plan_report.servers_lines(planner, command))
        return envelope("plan", True, result={"text": text}) if as_json else text, 0
    strategy = request.strategy
    if strategy is not None and not as_json:
        plan = planner.plan(strategy)
        _draw(plan, output)
        return plan_report.explain(planner, plan, command), int(plan.missing_bytes > 0)
    plans = planner.search([strategy] if strategy is not None else None)
    status = int(not plans.fitting)
    if plans.best is not None:
        _draw(plans.best, output)
    if as_json:
        return envelope("plan", not status, result=plan_report.as_json(planner, plans)), status
    mtbf_s, failures = options.mtbf or request.cluster.mtbf_s, []
    if mtbf_s < inf:
        step_s = plans.best.seconds if plans.best else inf
        times = options.save, options.restart, step_s
        failures = [plan_report.failures_text(mtbf_s, request.cluster.ranks, *times), ""]
    return plan_report.report(planner, plans, command, failures), status


def _draw(plan: Plan, output: Path | None) -> None:
    """Draw a plan that fits, if a file was asked for."""
    if output is not None and plan.time is not None:
        from shoal.plotting.plan_picture import plot_plan

        plot_plan(plan, output)
