"""The addresses by which hosts reach each other, found by routes and by connections that are tried.

    driver                agent of the first host           agents of all others
      | ------- listen on these addresses -> ReachListener          |
      | <------ ports ---------------------------|                  |
      | ------- reach these addresses and ports ------------------> | try_reach
      |                    <======= a connection to each address == |
      |                    == one back to where it came from ====>  |
      | <------ Reach for each address ---------------------------- |
    choose_address

Names are not used: a host's own name often leads to its loopback address (Debian's 127.0.1.1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

REACH_S = 2.0
"""Seconds to wait for one connection between two hosts."""


@dataclass(frozen=True)
class HostAddress:
    """One address of a host.

    Args:
        interface: the network interface that has it.
        address: IPv4 or IPv6, without a scope.
        prefix: bits of the address that are its network.
    """

    interface: str
    address: str
    prefix: int


@dataclass(frozen=True)
class Reach:
    """The outcome of one host's try to reach one address of the first host, and to be reached.

    Args:
        address: that was tried.
        source: this host's own address on the way there; None where there is no way.
        problem: empty where both directions work.
    """

    address: str
    source: str | None
    problem: str

    def to_json(self) -> dict[str, Any]:
        """Return it as an object of JSON."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, document: object) -> Reach:
        """Return the outcome of an object of JSON. Raises ValueError where it is none."""
        raise NotImplementedError


def local_addresses() -> tuple[HostAddress, ...]:
    """Return this host's addresses of interfaces that are up, without loopback and link-local ones.

    Raises:
        OSError: the system does not tell them.
    """
    raise NotImplementedError


def source_address(peer: str) -> str:
    """Return this host's own address on the route to the address `peer`. Nothing is sent.

    Raises:
        OSError: there is no route.
    """
    raise NotImplementedError


def candidate_addresses(
    addresses: Sequence[HostAddress],
    ssh_address: str | None,
    address: str | None = None,
    interface: str | None = None,
) -> list[str]:
    """Return the addresses at which the first host may be tried, the most promising first.

    Args:
        addresses: of the first host, from its facts.
        ssh_address: from its facts; it comes first if it is among `addresses`.
        address: the user's choice, which must be among `addresses`.
        interface: the user's choice of an interface of the first host.

    Raises:
        UsageError: the host has no such address or interface, or no address at all.
    """
    raise NotImplementedError


class ReachListener:
    """Sockets at which other hosts can try to reach this one, answered in a thread of their own.

    A context; leaving it closes the sockets and ends the thread. A connection that does not begin
    with the nonce is closed without an answer.

    Args:
        addresses: of this host; those that it cannot listen on are left out of `ports`.
        nonce: known to the driver and its agents alone.

    Attributes:
        ports: the port of each address.
    """

    ports: Mapping[str, int]

    def __init__(self, addresses: Sequence[str], nonce: str) -> None:
        raise NotImplementedError

    def __enter__(self) -> ReachListener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all sockets and wait for the thread. A second call changes nothing."""
        raise NotImplementedError


def try_reach(ports: Mapping[str, int], nonce: str, timeout_s: float = REACH_S) -> list[Reach]:
    """Return for each address in `ports` whether this host reaches it and is reached from there.

    All are tried at once, so this takes about `timeout_s`.
    """
    raise NotImplementedError


def choose_address(
    first: str, candidates: Sequence[str], reports: Mapping[str, Sequence[Reach]]
) -> str | list[str]:
    """Return the first candidate that all hosts reach both ways; else who cannot reach whom.

    Args:
        first: the name of the first host.
        candidates: its addresses, the most promising first.
        reports: what each other host found, by its name. Without other hosts the first candidate
            is chosen.

    Returns:
        The address, or a list of problems with one line for each host that reaches none.
    """
    raise NotImplementedError
