"""Connections by ssh to stand-ins of agents, and what became of those that did not come about."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from namespaces import Host, Hosts

from shoal.launch.hosts.addresses import candidate_addresses, choose_address
from shoal.launch.hosts.host_facts import FactsRequest, HostFacts
from shoal.launch.hosts.ssh_client import agent_command, describe_ssh_failure

LEASE_S = 2.0


def stand_in(folder: Path) -> str:
    """Write a program that starts a stand-in where an interpreter is expected; return its path."""
    program = folder / "my python ü"
    script = Path(__file__).with_name("stand_in_agent.py")
    program.write_text(f"#!/bin/sh\nexec {sys.executable} -X utf8 {script}\n")
    program.chmod(0o755)
    return str(program)


class AgentClient:
    """One ssh client on the desk, with a stand-in of an agent at its other end.

    Args:
        python: a path made by `stand_in`.
        destination: for ssh: the name of a host, with a user or without.
    """

    def __init__(self, hosts: Hosts, python: str, destination: str) -> None:
        self.destination, self.python = destination, python
        self.errors = hosts.folder / f"errors-{destination}-{time.monotonic_ns()}"
        with self.errors.open("wb") as errors:
            self.process = hosts.start(
                hosts.desk,
                agent_command(destination, python, LEASE_S, hosts.ssh),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        assert self.process.stdin
        assert self.process.stdout
        self._requests, self._answers = self.process.stdin, self.process.stdout
        self.noise: list[str] = []

    def __enter__(self) -> AgentClient:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._requests.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._answers.close()

    def starts(self) -> bool:
        """Return True when the marker has come; False when the connection has ended before."""
        while line := self._answers.readline():
            if line.startswith(b"SHOAL-AGENT "):
                return True
            self.noise.append(line.decode().rstrip("\n"))
        self.process.wait()
        return False

    def failure(self) -> str:
        """Return the problem that a user would be told; for a client that did not start."""
        stderr = self.errors.read_text().splitlines()
        code = self.process.poll()
        return describe_ssh_failure(self.destination, code, stderr, self.noise, self.python)

    def ask(self, do: str, **request: Any) -> Any:
        """Send a request, and return its answer."""
        self._requests.write(json.dumps({"do": do, **request}).encode() + b"\n")
        self._requests.flush()
        return json.loads(self._answers.readline())

    def facts(self, request: FactsRequest) -> HostFacts:
        return HostFacts.from_json(self.ask("facts", **dataclasses.asdict(request)))


@contextlib.contextmanager
def agents(hosts: Hosts, python: str, destinations: list[str]) -> Iterator[list[AgentClient]]:
    """Connect to all destinations at once; every one must start."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(AgentClient(hosts, python, one)) for one in destinations]
        for client in clients:
            assert client.starts(), client.failure()
        yield clients


def chosen_address(clients: list[AgentClient]) -> str:
    """Return the address of the first host that is chosen. Raises LaunchError."""
    first, *others = clients
    facts = first.facts(FactsRequest("/"))
    candidates = candidate_addresses(facts.addresses, facts.ssh_address)
    ports = first.ask("listen", addresses=candidates)
    reports = {one.destination: one.ask("reach", ports=ports) for one in others}
    return choose_address(first.destination, ports, reports)


def block(hosts: Hosts, host: Host, address: str) -> None:
    """Let a host lose what it would send to an address."""
    command = [*host.enter("--net"), "ip", "route", "add", "blackhole", address]
    subprocess.run(command, check=True)
