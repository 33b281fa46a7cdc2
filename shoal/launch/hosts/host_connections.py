"""The connections of a driver to the agents of all hosts."""

from __future__ import annotations

import itertools
import socket
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any

from shoal.errors import LaunchError, printable
from shoal.launch.hosts.agent_session import PROTOCOL, Message, clock_s, lease_s
from shoal.launch.hosts.driver_session import DriverSession, HostEvent
from shoal.launch.hosts.host_facts import HostFacts
from shoal.launch.hosts.ssh_client import (
    SshClient,
    SshHost,
    agent_command,
    describe_ssh_failure,
    ssh_program,
)
from shoal.launch.output import LinePrinter

RETRY_S = 0.02  # until a connection takes more bytes
MOST_STARTS = 8
"""Clients that start at a time. They may all meet at one jump host, and an ssh server drops
connections that are not authenticated yet beyond its MaxStartups, 10 where nobody has changed it.
"""
START_S = 20.0
"""From the start of a client to the facts of its host."""
CLOSE_S = 3.0


class HostConnections:
    """Clients and session of a run on several hosts.

    Args:
        hosts: in the user's order; they are numbered from 0.
        python: the interpreter on the hosts.
        specification: what each agent is told first.
        printer: of the output of ranks.

    Attributes:
        session: the driver's side of the protocol.
        printer: of the output of ranks.
        facts: of the hosts that are connected, by number.
    """

    def __init__(
        self,
        hosts: Sequence[SshHost],
        python: str,
        specification: Mapping[str, Any],
        printer: LinePrinter,
    ) -> None:
        self.hosts = hosts
        self.session = DriverSession(len(hosts), lease_s())
        self.printer = printer
        self.facts: dict[int, HostFacts] = {}
        self._python = python
        self._specification = specification
        self._clients: dict[int, SshClient] = {}
        self._questions = itertools.count(1)
        self._answers: dict[int, Message] = {}
        self._events: list[HostEvent] = []  # that came while an answer was waited for

    def name(self, host: int) -> str:
        """Return the name of a host as the user wrote it."""
        return printable(self.hosts[host].name)

    @property
    def connected(self) -> list[int]:
        """Return the hosts whose agents have told their facts, in the order of their ranks."""
        return [host for host in sorted(self.facts) if self.session.states[host].is_connected]

    def pump(self, timeout_s: float, sources: Sequence[Any] = ()) -> list[HostEvent]:
        """Send and receive for at most `timeout_s`; return events of ranks and lost hosts.

        It returns earlier with an event, and when one of `sources` can be read.

        Raises:
            BrokenPipeError: nobody reads what this process prints.
        """
        self._send()
        due_s = self.session.due_s - clock_s()
        if any(client.has_unsent for client in self._clients.values()):
            due_s = min(due_s, RETRY_S)
        streams: list[Any] = [*sources]
        streams += (stream for client in self._clients.values() for stream in client.sources)
        wait(streams, 0.0 if self._events else max(0.0, min(timeout_s, due_s)))
        events = self._receive()
        events += self.session.tick(clock_s())
        if self.printer.error is not None:
            raise self.printer.error
        found, self._events = self._events, []
        found += [event for event in events if self._is_for_others(event)]
        self._send()
        return found

    def connect(self, hosts: Sequence[int], sources: Sequence[socket.socket] = ()) -> list[str]:
        """Connect to hosts whose ranks are surely gone, several at a time.

        Args:
            hosts: their numbers.
            sources: end the attempt when one of them can be read.

        Returns:
            A problem for each host that could not be connected.

        Raises:
            UsageError: there is no ssh client.
        """
        remaining = list(hosts)
        starting: dict[int, float] = {}  # the time by which a host must answer
        problems: dict[int, str] = {}
        while (remaining or starting) and not wait(sources, 0):
            while remaining and len(starting) < MOST_STARTS:
                host = remaining.pop(0)
                self.drop(host)  # it may have been lost while nobody looked
                name = self.hosts[host].name
                command = agent_command(name, self._python, self.session.lease_s, ssh_program())
                self._clients[host] = SshClient(command)
                starting[host] = clock_s() + START_S
            self.pump(0.1, sources)
            for host, limit_s in list(starting.items()):
                if host in self.facts:
                    del starting[host]
                elif problem := self._start_problem(host, clock_s() > limit_s):
                    del starting[host]
                    problems[host] = problem
                    self.drop(host)
        for host in starting:
            self.drop(host)
        return [problems[host] for host in hosts if host in problems]

    def ask(self, questions: Mapping[int, Mapping[str, Any]], limit_s: float) -> dict[int, Message]:
        """Ask hosts, and return their answers. What else comes is for the next `pump`.

        Raises:
            LaunchError: a host does not answer in time, is lost, or answers with a problem.
        """
        end_s = clock_s() + limit_s
        asked = {host: next(self._questions) for host in questions}
        for host, number in asked.items():
            self.session.send(host, "ask", number=number, **questions[host])
        came: list[HostEvent] = []
        while missing := [host for host, number in asked.items() if number not in self._answers]:
            came += self.pump(max(0.0, end_s - clock_s()))
            lost = [event for event in came if event.message["do"] == "lost"]
            reasons = {event.host: event.message["reason"] for event in lost}
            host = next((host for host in missing if host in reasons), missing[0])
            if host in reasons or clock_s() > end_s:
                self._events = came
                reason = f"is lost: {reasons[host]}" if host in reasons else "does not answer"
                raise LaunchError(f"host {self.name(host)}: its agent {reason}.")
        self._events = came
        answers = {host: self._answers.pop(number) for host, number in asked.items()}
        for host, answer in answers.items():
            if problem := answer.get("problem"):
                raise LaunchError(f"host {self.name(host)}: {problem}")
        return answers

    def drop(self, host: int) -> str:
        """Close the connection to a host. Return what its client had printed last."""
        client = self._clients.pop(host, None)
        if client is not None:
            client.close()
        self.session.disconnected(host, "it was closed")
        self.facts.pop(host, None)
        self._events = [event for event in self._events if event.host != host]
        return "" if client is None else " | ".join(list(client.errors)[-2:])

    def close(self) -> None:
        """End all agents and their clients, and print what has come from them."""
        self._send()
        for client in self._clients.values():
            client.close_input()
        end_s = clock_s() + CLOSE_S
        for client in self._clients.values():
            client.close(max(0.0, end_s - clock_s()))
        self._clients.clear()
        self.facts.clear()
        self.printer.flush()

    def _send(self) -> None:
        for host, client in self._clients.items():
            client.send(self.session.to_send(host))

    def _receive(self) -> list[HostEvent]:
        events: list[HostEvent] = []
        for host, client in self._clients.items():
            is_agent = bool(client.protocol)
            data = client.read()
            if client.protocol and not is_agent and client.protocol == str(PROTOCOL):
                self.session.connected(host, clock_s(), **self._specification)
            if data is not None:
                events += self.session.received(host, data, clock_s())
            for line in client.read_errors():
                if host in self.facts:
                    print(f"[{self.name(host)}] {printable(line)}", file=sys.stderr, flush=True)
        return events

    def _is_for_others(self, event: HostEvent) -> bool:
        """Return False for an event that is dealt with here."""
        match event:
            case HostEvent(host, {"do": "hello"} as message):
                self.facts[host] = HostFacts.from_json(message["facts"])
            case HostEvent(_, {"do": "answer"} as message):
                self._answers[message["number"]] = message
            case HostEvent(host, {"do": "out"} as message):
                rank = message["rank"] if self.hosts[host].count else None
                self.printer.put(self.name(host), rank, message["stream"], message["text"])
            case HostEvent(_, {"do": "dropped"} as message):
                self.printer.dropped += message["lines"]
            case _:
                return True
        return False

    def _start_problem(self, host: int, is_late: bool) -> str:
        """Return why a host has not told its facts; empty while it may."""
        client = self._clients[host]
        name = self.hosts[host].name
        if client.protocol and client.protocol != str(PROTOCOL):
            return (
                f"host {self.name(host)}: its Shoal speaks protocol {printable(client.protocol)}, "
                f"this one {PROTOCOL}. Install the same version on both."
            )
        has_ended = client.exit_code is not None and not client.sources
        if not has_ended and not is_late:
            return ""
        if client.protocol and has_ended:
            last = " | ".join(list(client.errors)[-3:])
            return f"host {self.name(host)}: its agent ended at once: {printable(last)}"
        code = client.exit_code
        return describe_ssh_failure(name, code, client.errors, client.noise, self._python)
