"""The options of commands that start ranks on several hosts by ssh."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from shoal.cli import argument_types
from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.launch.hosts.hosts_job import HostsOptions
    from shoal.strategies import StrategyLine

ALONE = ("env", "address", "min_hosts", "server_hosts")
WITH_VALUE = ("--hosts", "--server-hosts", "--env", "--address", "--min-hosts")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options; --python is one of `cluster_options`."""
    group = parser.add_argument_group("several hosts, by ssh")
    group.add_argument("--hosts", metavar="LIST", help="hosts and their ranks: a:2,user@b:2")
    group.add_argument(
        "--server-hosts",
        metavar="LIST",
        help="hosts of the parameter servers alone: c,d (default: the servers are beside ranks)",
    )
    group.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="variable to carry to all hosts; may be repeated",
    )
    group.add_argument(
        "--address",
        help="address of the first host for the rendezvous (default: one that all hosts reach)",
    )
    group.add_argument(
        "--min-hosts",
        type=argument_types.integer(1),
        help="shoal train: go on without lost hosts as long as this many are left",
    )


def read(options: argparse.Namespace) -> HostsOptions | None:
    """Return the options of a command for several hosts; None where it names no host.

    Raises:
        UsageError: an option makes no sense.
    """
    if options.hosts is None:
        _check_none_given(options)
        return None
    from shoal.launch.hosts.hosts_job import HostsOptions
    from shoal.launch.hosts.ssh_hosts import parse_hosts, parse_server_hosts

    hosts = parse_hosts(options.hosts)
    if options.server_hosts is not None:
        hosts += parse_server_hosts(options.server_hosts, hosts)
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
    if line is None:
        raise UsageError(
            f"{listed}: only the script knows its strategy. Say it too: "
            f"--strategy server={len(named)}"
        )
    chosen = [spec.options for spec in line.specs if isinstance(spec.options, ServerOptions)]
    if not chosen:
        raise UsageError(
            f"{listed}: strategy {line} has no parameter servers. Use --strategy "
            f"server={len(named)}, or leave --server-hosts out"
        )
    if chosen[0].servers < len(named):
        raise UsageError(
            f"{listed}: server={chosen[0].servers} leaves hosts without a server. Use "
            f"server={len(named)} or more, or name fewer hosts"
        )


def _check_none_given(options: argparse.Namespace) -> None:
    """Raise UsageError if an option is about several hosts, and none is named."""
    given = [name for name in ALONE if getattr(options, name)]
    if given:
        name = given[0].replace("_", "-")
        raise UsageError(f"--{name} is about several hosts. Name them by --hosts")


def _check_numbers(processes: int | None, found: HostsOptions) -> None:
    """Raise UsageError if -n or --min-hosts does not go with the hosts."""
    if processes is not None and processes != found.processes:
        raise UsageError(
            f"-n {processes}: the hosts have {found.processes} ranks "
            f"({', '.join(map(str, found.with_ranks))}; 1 where the list says no number). "
            "Leave -n out."
        )
    hosts = len(found.with_ranks)
    if found.min_hosts is not None and found.min_hosts > hosts:
        raise UsageError(f"--min-hosts {found.min_hosts}: there are {hosts} hosts")


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or (not equals and name not in os.environ):
        raise UsageError(f"--env {text}: give NAME=VALUE, or the name of a variable that is set")
    return name, value if equals else os.environ[name]
