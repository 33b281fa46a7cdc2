"""A run on several hosts: its starts, and its hosts that are lost and come back.

this process ─┬─ ssh ── agent of host 0 ── ranks 0, 1
              ├─ ssh ── agent of host 1 ── ranks 2, 3
              └─ ssh ── agent of host 2 ── parameter servers, no rank
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import wait
from socket import socket

from shoal.errors import LaunchError, UsageError
from shoal.launch.control_channel import ControlServer
from shoal.launch.hosts.addresses import candidate_addresses, choose_address
from shoal.launch.hosts.agent_session import clock_s
from shoal.launch.hosts.host_connections import HostConnections
from shoal.launch.hosts.host_facts import FactsRequest, collect_facts, problems
from shoal.launch.hosts.remote_ranks import HostRanks, RemoteRanks, placed
from shoal.launch.hosts.ssh_client import UNRESOLVED, SshHost
from shoal.launch.output import LinePrinter, print_note
from shoal.launch.rank import EXIT_INTERRUPTED
from shoal.launch.rank_info import LOOPBACK
from shoal.launch.restarting import RestartingRun, Work
from shoal.watchdog.hang_limit import limit_of_ranks

SERVER_HOST = "shoal.parameter_server.server_host"
"""Module of the process that starts the servers of a host without ranks."""
ANSWER_S = 15.0
PREPARE_S = 300.0
"""For the import of torch on the slowest host."""
RETRIES_S = (0.0, 10.0, 30.0, 90.0)
"""Waits before each try to connect to a lost host again."""


@dataclass(frozen=True)
class HostsOptions:
    """The options of a command that starts ranks on several hosts.

    Args:
        hosts: in the order of their ranks; then those of parameter servers, which have no rank.
        python: the interpreter there.
        variables: environment variables that are carried to all hosts.
        address: at which all ranks meet, on the first host; None finds it.
        min_hosts: a run goes on without lost hosts while it has so many of ranks; None for all.
    """

    hosts: Sequence[SshHost]
    python: str
    variables: Mapping[str, str] = field(default_factory=dict)
    address: str | None = None
    min_hosts: int | None = None

    @property
    def processes(self) -> int:
        """The number of ranks on all hosts."""
        return sum(host.count for host in self.hosts)

    @property
    def with_servers(self) -> list[SshHost]:
        """The hosts that have parameter servers and no rank."""
        return [host for host in self.hosts if not host.count]


class HostsJob(Work):
    """The work of ranks on several hosts.

    Args:
        options: of the command.
        work: of the ranks.
        request: the paths that every host is asked about.
    """

    def __init__(self, options: HostsOptions, work: Work, request: FactsRequest) -> None:
        super().__init__(**vars(work))
        self.options = options
        self.request = request
        self.secret = secrets.token_bytes(32)
        told = {
            "variables": dict(options.variables),
            "secret": self.secret.hex(),
            "request": asdict(request),
            "work": {
                "environment": dict(work.environment),
                "output": work.output,
                "preload": work.modules,
            },
        }
        printer = LinePrinter(work.output)
        self.connections = HostConnections(options.hosts, options.python, told, printer)
        # The ranks that the user wants, and those that there are while hosts are missing.
        self._wanted = self._found = options.processes

    def connect(self) -> None:
        """Connect to all hosts and check them.

        Raises:
            LaunchError: the message has all problems of all hosts.
            UsageError: the same where a name stands for no host.
        """
        hosts = range(len(self.options.hosts))
        failed = self.connections.connect(hosts)
        if found := [*failed, *self._host_problems()]:
            # A name that stands for no host is a wrong word in the command; a host may come back.
            is_unknown = any(UNRESOLVED in problem.lower() for problem in failed)
            kind = UsageError if is_unknown else LaunchError
            raise kind("\n  ".join(["The run cannot start on these hosts:", *found]))

    def problems(self, processes: int) -> Sequence[str]:
        slots = self._slots()
        if processes > sum(slots.values()):
            listed = ", ".join(f"{self.connections.name(host)}:{n}" for host, n in slots.items())
            return [
                f"{processes} processes were asked for, and its hosts have room for "
                f"{sum(slots.values())} ({listed}). Start it again with a longer list to have more."
            ]
        return super().problems(processes)

    def saved_step(self) -> int | None:
        if self.find_step is None or not self._slots():
            return None
        function, arguments = self.find_step
        question = {"question": "call", "function": function, "arguments": list(arguments)}
        first = min(self._slots())  # a host of servers alone need not see the run directory
        step: int | None = self.connections.ask({first: question}, ANSWER_S)[first]["value"]
        return step

    def start(self, processes: int, again: bool, signals: socket | None) -> RemoteRanks:
        if processes != self._found:  # `shoal scale`
            self._wanted = self._found = processes
        slots = self._slots()
        if processes > sum(slots.values()):
            raise LaunchError(
                f"{processes} processes cannot start: the hosts that are left have room for "
                f"{sum(slots.values())}. Start the same command again once all hosts are there."
            )
        placement = placed(slots, processes)
        serving = self._serving()
        if self.options.with_servers and not serving:
            raise LaunchError(
                "no host of --server-hosts is left. Start the same command again once one is there."
            )
        members = [*(share.host for share in placement), *serving]
        address, port = find_meeting(self.connections, self.options.address, members)
        arguments = list(self.arguments_of(again))
        calls = [(share, self.target, arguments) for share in placement]
        for index, host in enumerate(serving):
            # Numbered after the ranks, which are all that there is in their world.
            share = HostRanks(host, processes + index, 1)
            program = [SERVER_HOST, [str(index), str(len(serving))]]
            calls.append((share, "shoal.launch.rank:module", program))
        starts = {
            share.host: {
                "target": target,
                "arguments": arguments,
                "first": share.first,
                "count": share.count,
                "world": processes,
                "address": address,
                "port": port,
                "server_hosts": len(serving),
            }
            for share, target, arguments in calls
        }
        self.connections.session.start(starts, clock_s())
        limit_s = limit_of_ranks(self.environment)
        return RemoteRanks(self.connections, placement, limit_s, serving)

    def available(self, processes: int, signals: socket) -> int:
        """Connect to lost hosts again. Return how many ranks can go on; 0 for none.

        Those are as many as the user wants, if the hosts that are there have room for them.
        """
        wanted = self._wanted if processes == self._found else processes
        for wait_s in RETRIES_S:
            absent = self._missing()
            begin_s = clock_s() + (wait_s if absent else 0.0)
            while (remaining_s := begin_s - clock_s()) > 0 and not wait([signals], 0):
                self.connections.pump(remaining_s, [signals])
            # A host that came back with another torch cannot take part.
            problems = [*self.connections.connect(absent, [signals]), *self._host_problems()]
            if wait([signals], 0):
                return 0
            for problem in problems:
                print_note(problem)
            slots = self._slots()
            found = min(wanted, sum(slots.values()))
            is_whole = found == wanted and len(self._serving()) == len(self.options.with_servers)
            if is_whole or self._may_go_on(len(slots), found):
                self._wanted, self._found = wanted, found
                return found
        print_note("the lost hosts did not come back")
        return 0

    def _host_problems(self) -> list[str]:
        there = self.connections
        checked = [(there.hosts[host], there.facts[host]) for host in there.connected]
        return problems(checked, self.request, collect_facts(self.request))

    def _missing(self) -> list[int]:
        connected = self.connections.connected
        return [host for host in range(len(self.options.hosts)) if host not in connected]

    def _slots(self) -> dict[int, int]:
        """Return the room of each host that can have ranks now, in the order of their ranks."""
        counts = {host: self.options.hosts[host].count for host in self.connections.connected}
        return {host: count for host, count in counts.items() if count}

    def _serving(self) -> list[int]:
        """Return the hosts of servers alone that are there."""
        hosts = self.options.hosts
        return [host for host in self.connections.connected if not hosts[host].count]

    def _may_go_on(self, hosts: int, processes: int) -> bool:
        """Return True if the run may go on with so many hosts and processes."""
        fewest = self.options.min_hosts
        if fewest is None or hosts < fewest:
            return False
        if self.options.with_servers and not self._serving():
            return False
        if problems := self.check(processes):
            print_note(f"{processes} processes cannot go on: {' '.join(problems)}")
            return False
        left = ", ".join(self.connections.name(host) for host in self._missing())
        print_note(f"the run goes on without {left}")
        return True


def find_meeting(
    connections: HostConnections, choice: str | None, hosts: Sequence[int]
) -> tuple[str, int]:
    """Prepare hosts for ranks; find the address of the first at which all others reach it.

    Args: choice: the user's, of the first host of the list, which may be lost by now.

    Returns: that address, and the port of the socket there.

    Raises:
        LaunchError: there is none; the message says who cannot reach whom.
        UsageError: the user's choice is none of its addresses.
    """
    first, *others = hosts
    facts = connections.facts[first]
    candidates = [LOOPBACK]
    if others:
        candidates = candidate_addresses(
            facts.addresses, facts.ssh_address, choice if first == 0 else None
        )
    prepare = {
        host: {"question": "prepare", "addresses": candidates if host == first else []}
        for host in hosts
    }
    ports = connections.ask(prepare, PREPARE_S)[first]["ports"]
    if not ports:
        listed = ", ".join(candidates)
        raise LaunchError(f"host {connections.name(first)}: it cannot listen at {listed}.")
    reach = {"question": "reach", "ports": ports}
    answers = connections.ask(dict.fromkeys(others, reach), ANSWER_S)
    reports = {connections.name(host): answer["reached"] for host, answer in answers.items()}
    address = choose_address(connections.name(first), ports, reports)
    return address, ports[address]


def run_on_hosts(
    options: HostsOptions,
    work: Work,
    request: FactsRequest,
    control: ControlServer | None = None,
    restarts: int = 0,
) -> int:
    """Run `work` on all hosts to its end. Main thread only.

    Args:
        request: the paths that every host is asked about.
        control, restarts: as for `RestartingRun`.

    Returns:
        The exit code, as `RestartingRun.run`.

    Raises:
        LaunchError: the hosts cannot be used; the message has all their problems.
        UsageError: an option, the ssh client or the name of a host cannot be used.
    """
    try:
        job = HostsJob(options, work, request)
        with closing(job.connections):
            job.connect()
            # The hosts import torch in it, which Ctrl-C need not wait for.
            ranks = job.start(options.processes, again=False, signals=None)
            return RestartingRun(job, options.processes, control, restarts).run(ranks)
    except KeyboardInterrupt:  # before signals are caught
        return EXIT_INTERRUPTED
