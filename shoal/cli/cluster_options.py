"""Several machines, of `launch` and `train`: by ssh (`--hosts`), or as a job (`--slurm`)."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from shoal.cli import argument_types
from shoal.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from shoal.launch.batch_script import ClusterWork
    from shoal.launch.hosts.hosts_job import HostsOptions
    from shoal.strategies import StrategyLine

REQUEUES = 20
"""Requeues of a job that was stopped and has saved: a limit for one that never gets further."""

SERVER_DIRECTORY = "SHOAL_SERVER_DIRECTORY"

NUMBERS = {
    "nodes": (1, "machines (default: 1)"),
    "ntasks-per-node": (1, "ranks on each machine (default: 1)"),
    "requeues": (0, "how often a job that was stopped and has saved goes on (default: 20)"),
}
"""Options with a whole number: the smallest, and the help."""
HOSTS = {
    "hosts": ("LIST", "hosts and their ranks: a:2,user@b:2"),
    "server-hosts": ("LIST", "hosts of the servers alone: c,d (default: servers beside ranks)"),
    "address": ("IP", "of the first host, for the rendezvous (default: one that all reach)"),
}
VALUES = {
    "time": ("LIMIT", "minutes, MM:SS, HH:MM:SS or D-HH:MM:SS; ranks save before it"),
    "partition": ("NAME", "where the job runs"),
    "python": ("PATH", "interpreter on the machines (default: this one)"),
}
MORE = "sbatch-option"
"""Name of the option for all others of sbatch."""
FLAGS = {
    "slurm": "as one job of Slurm, with --nodes N: docs/clusters.md",
    "dry-run": "print the batch script, and submit nothing",
}
OF_HOSTS = ("env", "address", "min-hosts", "server-hosts")
"""Options that go with --hosts alone."""
NAMES = tuple(f"--{name}" for name in (*OF_HOSTS, *NUMBERS, *VALUES, MORE, *FLAGS))


def host_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of hosts that are reached by ssh."""
    group = parser.add_argument_group("several hosts, by ssh")
    for name, (metavar, help) in HOSTS.items():
        group.add_argument(f"--{name}", metavar=metavar, help=help)
    group.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="variable to carry to all hosts; may be repeated",
    )
    group.add_argument(
        "--min-hosts",
        type=argument_types.integer(1),
        help="shoal train: go on without lost hosts as long as this many are left",
    )


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a cluster, and --python, which hosts have too."""
    group = parser.add_argument_group("clusters")
    for name, help in FLAGS.items():
        group.add_argument(f"--{name}", action="store_true", help=help)
    for name, (low, help) in NUMBERS.items():
        kind = argument_types.integer(low, 1_000_000)
        group.add_argument(f"--{name}", type=kind, metavar="N", help=help)
    for name, (metavar, help) in VALUES.items():
        group.add_argument(f"--{name}", metavar=metavar, help=help)
    help = "a further option, e.g. --sbatch-option=gres=gpu:4"
    group.add_argument(f"--{MORE}", action="append", default=[], metavar="NAME=VALUE", help=help)


def is_asked(options: argparse.Namespace) -> bool:
    """Return True if the command is for a cluster.

    Raises:
        UsageError: options of a cluster are given, and no cluster.
    """
    if options.slurm:
        return True
    # Hosts that are reached by ssh have an interpreter too.
    values = [*NUMBERS, *(name for name in VALUES if name != "python" or options.hosts is None)]
    if given := _given(options, (*values, MORE, *FLAGS)):
        raise UsageError(f"{', '.join(given)}: only with --slurm")
    return False


def submit(options: argparse.Namespace, make_work: Callable[[int, list[str]], ClusterWork]) -> int:
    """Submit the command's work as a job, and return the exit code.

    Args:
        options: of the command.
        make_work: the verb's part, for so many ranks. It adds a line to the list for each thing
            that is wrong, or raises ConfigError or UsageError.

    Raises:
        UsageError: something is wrong, in any part; nothing was submitted.
    """
    from shoal.launch import batch_script
    from shoal.launch.environment import own_place

    info = own_place()
    if info.world > 1:
        raise UsageError(
            f"a job is submitted once, but here it is one of {info.world}: {info.reason}"
        )
    problems = []
    if given := _given(options, ("processes", "hang-limit", "hosts", *OF_HOSTS)):
        problems.append(
            f"{', '.join(given)}: not with --slurm, for which srun starts the ranks. Give --nodes, "
            "--ntasks-per-node and --time"
        )
    options.nodes, options.ntasks_per_node = options.nodes or 1, options.ntasks_per_node or 1
    options.requeues = REQUEUES if options.requeues is None else options.requeues
    work = None
    try:
        work = make_work(options.nodes * options.ntasks_per_node, problems)
    except ConfigError as error:
        problems += error.problems
    except UsageError as error:
        problems.append(str(error))
    problems += batch_script.problems(options)
    if not options.dry_run:
        problems += batch_script.missing(options)
    if problems or work is None:
        raise UsageError("\n  ".join(problems))
    command = batch_script.remark(["shoal", *options.words])
    python = options.python or sys.executable
    script = batch_script.render(options, work, python, os.getcwd(), command)
    if options.dry_run:
        print(script, end="")
        return 0
    job = batch_script.submit(script)
    log = f"{work.name}-{job}.out"
    told = f"its log: tail -F {log}; its state: squeue -j {job}; its end: scancel {job}"
    print(f"shoal: job {job} is submitted; {told}")
    if (notice_s := batch_script.notice_s(options.time)) < batch_script.NOTICE_S:
        print(
            f"shoal: note: --time {options.time} is short: the ranks are told to save {notice_s} s "
            "before its end, by Slurm up to a minute earlier; what is not saved by then is lost"
        )
    return 0


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
    if not has_servers or options.nodes in (None, 1):
        return {}
    if directory := os.environ.get(SERVER_DIRECTORY):
        return {SERVER_DIRECTORY: directory}
    problems.append(
        f"strategy server on several machines: they read the servers' key from a file. Set "
        f"{SERVER_DIRECTORY} to a directory that all of them share"
    )
    return {}


def without(words: Sequence[str], more: Sequence[str] = ()) -> list[str]:
    """Return the words of a command without the options of this module.

    Args:
        words: of the command; none of a user's script.
        more: names of further options with a value, to be left out too.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    arguments(parser)
    for name in more:
        parser.add_argument(name)
    return parser.parse_known_args(list(words))[1]


def _given(options: argparse.Namespace, names: Sequence[str]) -> list[str]:
    values: dict[str, Any] = vars(options)
    return [
        "-n" if name == "processes" else f"--{name}"
        for name in names
        if values[name.replace("-", "_")] not in (None, [], False)
    ]


def hosts_of(options: argparse.Namespace) -> HostsOptions | None:
    """Return the options of a command for several hosts; None where it names no host.

    Raises:
        UsageError: an option makes no sense.
    """
    if options.hosts is None:
        if given := _given(options, OF_HOSTS):
            raise UsageError(f"{given[0]} is about several hosts. Name them by --hosts")
        return None
    from shoal.launch.hosts.hosts_job import HostsOptions
    from shoal.launch.hosts.ssh_client import parse_hosts

    hosts = parse_hosts(options.hosts)
    if options.server_hosts is not None:
        hosts += parse_hosts(options.server_hosts, hosts)
    found = HostsOptions(
        hosts=hosts,
        python=options.python or sys.executable,
        variables=dict(_variable(text) for text in options.env),
        address=options.address,
        min_hosts=options.min_hosts,
    )
    _check_numbers(options.processes, found)
    return found


def check_servers(hosts: HostsOptions, line: StrategyLine | None) -> None:
    """Raise UsageError if hosts are for servers, and the strategies have none, or fewer."""
    from shoal.strategies.options import ServerOptions

    named = hosts.with_servers
    if not named:
        return
    listed = f"--server-hosts {','.join(map(str, named))}"
    options = [spec.options for spec in (line.specs if line else ())]
    servers = sum(each.servers for each in options if isinstance(each, ServerOptions))
    if servers < len(named):
        raise UsageError(
            f"{listed}: the command names {servers} parameter servers, fewer than hosts for them. "
            f"Use --strategy server={len(named)} or more, or name fewer hosts"
        )


def _check_numbers(processes: int | None, found: HostsOptions) -> None:
    """Raise UsageError if -n or --min-hosts does not go with the hosts."""
    with_ranks = [host for host in found.hosts if host.count]
    if processes is not None and processes != found.processes:
        raise UsageError(
            f"-n {processes}: the hosts have {found.processes} ranks "
            f"({', '.join(map(str, with_ranks))}; 1 where the list says no number). "
            "Leave -n out."
        )
    if (found.min_hosts or 0) > len(with_ranks):
        raise UsageError(f"--min-hosts {found.min_hosts}: there are {len(with_ranks)} hosts")


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or (not equals and name not in os.environ):
        raise UsageError(f"--env {text}: give NAME=VALUE, or the name of a variable that is set")
    return name, value if equals else os.environ[name]
