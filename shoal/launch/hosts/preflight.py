"""The comparison of all hosts before any rank starts: every problem of every host in one list."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.launch.hosts.host_facts import FactsRequest, HostFacts
from shoal.launch.hosts.ssh_hosts import SshHost

CLOCK_S = 5.0
"""Clocks that differ by more are told."""


def problems(
    hosts: Sequence[tuple[SshHost, HostFacts]],
    request: FactsRequest,
    here: HostFacts | None = None,
    checkpoint_bytes: int | None = None,
) -> list[str]:
    """Return all reasons for which the run cannot start; empty where it can.

    Args:
        hosts: every host that answered, with its facts, in the user's order.
        request: which the facts answer.
        here: the facts of the driver's own host, whose Shoal and script the others must have; the
            first host takes its place where it is None.
        checkpoint_bytes: bytes of one checkpoint, if they are known.
    """
    raise NotImplementedError


def notes(hosts: Sequence[tuple[SshHost, HostFacts]], now_s: float | None = None) -> list[str]:
    """Return what the user should know and what does not keep the run from starting.

    Args:
        now_s: the driver's clock when the facts came; clocks are compared with it.
    """
    raise NotImplementedError
