"""`shoal launch`: run a user's script on several processes.

The options reach the script as environment variables, which `shoal.init()` reads. A script without
Shoal runs too: its ranks have RANK, WORLD_SIZE and the other variables of `env://`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli import (
    argument_types,
    cluster_options,
    job_options,
)
from shoal.config import builtin_names, trace_window
from shoal.errors import UsageError
from shoal.watchdog import hang_limit

if TYPE_CHECKING:
    from shoal.launch.batch_script import ClusterWork
    from shoal.strategies import StrategyLine

HELP = "run your own script on several processes"
EXAMPLES = """\
  shoal launch -n 4 train.py --epochs 3         words after the script are the script's own
  shoal launch -n 4 --strategy zero3 train.py   another strategy than the script's
  shoal launch -n 4 --strategy auto train.py    the one that shoal plan would take
  shoal launch -n 4 -m package.train            a module
  shoal launch --hosts a:2,b:2 train.py         two ranks on each of two hosts, by ssh
  shoal launch --hosts a:2,b:2 --server-hosts c,d --strategy server=2 train.py
  shoal launch --slurm --nodes 4 train.py       four nodes of a Slurm cluster
"""
FLAGS = (
    *("-n", "--processes", "--strategy", "--accumulate", "--hosts", "--slurm", "--nodes"),
    *("--ntasks-per-node", "--sbatch-option"),
)
"""Flags of which there is a note where they stand behind the script."""


def arguments(parser: argparse.ArgumentParser) -> None:
    argument_types.processes_argument(parser, "processes on this machine")
    cluster_options.host_arguments(parser)
    parser.add_argument(
        "--strategy", help="what shoal.init() uses in place of the script's own, e.g. ddp"
    )
    parser.add_argument(
        "--accumulate",
        type=argument_types.integer(1),
        help="micro-batches of each rank's share of a batch",
    )
    parser.add_argument(
        "--show-output",
        choices=("first", "all"),
        default="first",
        help="stdout to show: rank 0's or all ranks' (default: first)",
    )
    sentence = "it is --show-output here, first or all; other verbs write a file to --output"
    argument_types.answer_option(parser, "--output", sentence=sentence)
    job_options.trace_argument(parser)
    parser.add_argument(
        "--trace-to",
        type=argument_types.path,
        default=".",
        metavar="DIR",
        help="where the script's trace.json goes (default: here)",
    )
    job_options.hang_limit_argument(parser, "end the run")
    cluster_options.arguments(parser)
    parser.add_argument(
        "-m",
        "--module",
        action="store_true",
        help="SCRIPT is the name of a module, as in `python -m package.train`",
    )
    parser.add_argument("script", type=argument_types.path, metavar="SCRIPT", help="Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its own words")


def run(options: argparse.Namespace) -> int:
    from shoal.launch.environment import own_place

    for note in flags_behind_script(options):
        print(f"note: {note}", file=sys.stderr)
    if cluster_options.is_asked(options):
        return cluster_options.submit(options, partial(_cluster_work, options))
    info = own_place()
    if info.world > 1:
        raise UsageError(
            f"`shoal launch` starts ranks itself, but here it is one of {info.world}: "
            f"{info.reason}. Let that launcher start the ranks, without `shoal launch`: "
            f"python {options.script}"
        )
    hosts = cluster_options.hosts_of(options)
    if hosts is None and options.processes is None:
        raise UsageError(
            f"-n: how many processes? For example: shoal launch -n 4 {options.script}; on several "
            "hosts --hosts, on a cluster --slurm"
        )
    if hosts is not None and hosts.min_hosts is not None:
        raise UsageError("--min-hosts: shoal launch starts a script once. Leave it out")
    world = options.processes if hosts is None else hosts.processes
    script = Script.of(options)
    if options.strategy == job_options.AUTO:
        options.strategy = _choose(options, script)
    # Errors in the options are raised here, once, and not in every rank.
    line = _strategy_line(options.strategy)
    if problems := [*_problems(options, line, world), *script.problems]:
        raise UsageError("\n  ".join(problems))
    environment = _environment(options, line)
    from shoal.launch import preload
    from shoal.launch.restarting import RestartingRun, Work

    work = Work(
        target=f"shoal.launch.rank:{'module' if script.module else 'script'}",
        arguments=[script.module or script.file, list(options.arguments)],
        environment=environment,
        output=options.show_output,
        preload=preload.for_script(script.file),
        torch_store=True,
    )
    if hosts is None:
        return RestartingRun(work, options.processes).run()
    from shoal.launch.hosts.host_facts import FactsRequest
    from shoal.launch.hosts.hosts_job import run_on_hosts

    cluster_options.check_servers(hosts, line)
    request = FactsRequest(os.getcwd(), script=script.file)
    return run_on_hosts(hosts, work, request)


def _choose(options: argparse.Namespace, script: Script) -> str:
    """Return the planner's choice for a script, and print its reason.

    Raises:
        UsageError: the ranks are on several hosts, or the script cannot be followed.
        StrategyRefused: nothing fits.
    """
    from shoal.planner.auto_strategy import choose_for_script

    if options.processes is None or script.module is not None:
        raise UsageError(
            "--strategy auto chooses for a file and ranks on this machine: shoal launch -n 4 "
            "--strategy auto train.py. `shoal plan train.py --cluster FILE` plans several hosts"
        )
    if script.problems:
        raise UsageError("\n  ".join(script.problems))
    words = [script.file, *options.arguments]
    line, reason = choose_for_script(words, options.processes, options.accumulate or 0)
    print(reason, file=sys.stderr)
    return line


def _cluster_work(options: argparse.Namespace, ranks: int, problems: list[str]) -> ClusterWork:
    from shoal.launch.batch_script import ClusterWork, default_name

    script = Script.of(options)
    problems += script.problems
    line = _strategy_line(options.strategy)
    problems += _problems(options, line, ranks)
    servers = cluster_options.server_variables(options, line, problems)
    return ClusterWork(
        name=default_name(options.script.stem),
        words=(*(("-m", script.module) if script.module else (script.file,)), *options.arguments),
        environment=_environment(options, line) | servers,
        output=options.show_output,
        restarts=0,
    )


def _environment(options: argparse.Namespace, line: StrategyLine | None) -> dict[str, str]:
    """Return the variables that shoal.init() reads in the script.

    Raises:
        ConfigError: --trace is no window.
    """
    variables: dict[str, object] = {"SHOAL_STRATEGY": line, "SHOAL_ACCUMULATE": options.accumulate}
    if options.trace is not None:
        trace_window.parse_window(options.trace, "--trace")  # raises before any process starts
        variables |= {"SHOAL_TRACE": options.trace, "SHOAL_TRACE_TO": options.trace_to}
    variables[hang_limit.VARIABLE] = hang_limit.chosen_limit_s(options.hang_limit, os.environ)
    return {name: str(value) for name, value in variables.items() if value is not None}


def _problems(options: argparse.Namespace, line: StrategyLine | None, ranks: int) -> list[str]:
    """Return a line for each thing that so many ranks cannot do, or that is in the way."""
    from shoal.strategies.precheck import check

    on_machine = (options.ntasks_per_node or 1) if options.slurm else None
    found = [] if line is None else check(line, ranks, on_machine)
    trace_to = Path(options.trace_to)
    if options.trace is not None and trace_to.exists() and not trace_to.is_dir():
        found.append(f"--trace-to {trace_to}: that is no directory")
    return found


@dataclass(frozen=True)
class Script:
    """The script of a command.

    Attributes:
        file: its file.
        module: the name of the module, with -m; else None.
        problems: a line if there is no script.
    """

    file: str
    module: str | None
    problems: tuple[str, ...]

    @staticmethod
    def of(options: argparse.Namespace) -> Script:
        """Find the script of a command, without running any of it but parent packages."""
        name = str(options.script)
        if not options.module:
            return Script(name, None, tuple(_problems_of_file(name)))
        sys.path.insert(0, os.getcwd())  # as `python -m` does
        try:
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.submodule_search_locations is not None:
                spec = importlib.util.find_spec(f"{name}.__main__")
        except (ImportError, ValueError) as error:
            return Script(name, name, (f"-m {name}: {error}",))
        finally:
            sys.path.pop(0)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            return Script(name, name, (f"-m {name}: there is no such module in {Path.cwd()}",))
        return Script(os.path.relpath(spec.origin), name, ())


def _problems_of_file(name: str) -> Iterator[str]:
    if name.endswith((".yaml", ".yml")):
        yield f"{name} is an experiment: shoal train {name} -n 2"
    elif Path(name).is_file():
        return
    elif name in builtin_names():
        yield f"{name} is a built-in experiment: shoal train {name} -n 2"
    elif Path(f"{name.replace('.', '/')}.py").is_file():
        yield f"there is no script {name} in {Path.cwd()}; a module is -m {name}"
    else:
        yield f"there is no script {name} in {Path.cwd()}"


def flags_behind_script(options: argparse.Namespace) -> list[str]:
    """Return a note for each flag of `shoal launch` that stands behind the script."""
    words = [word.partition("=")[0] for word in options.arguments]
    return [
        f"{flag} stands behind {options.script}, so it goes to the script. For shoal launch it "
        f"stands before: shoal launch {flag} ... {options.script}"
        for flag in FLAGS
        if flag in words
    ]


def _strategy_line(strategy: str | None) -> StrategyLine | None:
    """Return the strategies of --strategy; None where it is not given. Raise ConfigError."""
    from shoal.strategies import parse_line

    return None if strategy is None else parse_line(strategy)
