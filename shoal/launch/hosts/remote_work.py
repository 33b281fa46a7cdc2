"""The work of ranks on several hosts, as an agent is told it: names and plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from shoal.launch.hosts.host_facts import FactsRequest
from shoal.launch.hosts.ssh_hosts import SshHost
from shoal.launch.output import Output


@dataclass(frozen=True)
class HostsOptions:
    """The options of a command that starts ranks on several hosts.

    Args:
        hosts: in the order of their ranks.
        python: the interpreter there.
        variables: environment variables that are carried to all hosts.
        address: at which all ranks meet, on the first host; None finds it.
        min_hosts: a run goes on without lost hosts while it has so many; None for all.
    """

    hosts: Sequence[SshHost]
    python: str
    variables: Mapping[str, str] = field(default_factory=dict)
    address: str | None = None
    min_hosts: int | None = None

    @property
    def processes(self) -> int:
        """The number of ranks on all hosts."""
        return sum(self.count(host) for host in range(len(self.hosts)))

    def count(self, host: int) -> int:
        """Return the number of ranks of one host: 1 where the user did not say it."""
        return self.hosts[host].processes or 1


@dataclass(frozen=True)
class RemoteWork:
    """The work of all ranks.

    Args:
        target: `module:function`, called in every rank.
        arguments: of the first start, plain data of JSON.
        again: of every later start.
        environment: variables of the ranks alone.
        output: the outputs that the user sees.
        preload: modules that are imported before ranks are forked.
        request: the paths that every host is asked about.
        saved_step: `module:function` and its arguments, which returns the step from which the next
            start resumes; None for work that is not resumed.
        problems: returns why so many ranks cannot do the work; empty where they can.
    """

    target: str
    arguments: Sequence[Any]
    again: Sequence[Any]
    environment: Mapping[str, str]
    output: Output
    preload: Sequence[str]
    request: FactsRequest
    saved_step: tuple[str, Sequence[Any]] | None = None
    problems: Callable[[int], Sequence[str]] = field(default=lambda processes: ())

    def specification(self, variables: Mapping[str, str], secret: bytes) -> dict[str, Any]:
        """Return what an agent is told first.

        Args: secret: of the job, the same for all agents.
        """
        return {
            "variables": dict(variables),
            "secret": secret.hex(),
            "request": asdict(self.request),
            "work": {
                "target": self.target,
                "arguments": list(self.arguments),
                "again": list(self.again),
                "environment": dict(self.environment),
                "output": self.output,
                "preload": [*self.preload, self.target.partition(":")[0]],
            },
        }
