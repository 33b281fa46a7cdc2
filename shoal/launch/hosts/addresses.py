"""The addresses by which hosts reach each other, found by connections that are tried.

    driver                agent of the first host           agents of all others
      | ------- listen at these addresses ---->  |                  |
      | <------ ports ---------------------------|                  |
      | ------- reach these addresses and ports ------------------> | try_reach
      |                    <======= a connection to each address == |
      | <------ Reach for each address ---------------------------- |
    choose_address

The kernel makes these connections; nobody accepts them. The socket at the address that is chosen
becomes that of the ranks' store. Names are not used: a host's own name often leads to its loopback
address (Debian's 127.0.1.1).
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

from shoal.errors import UsageError
from shoal.platform.interfaces import HostAddress, addresses_that_are_up
from shoal.platform.sockets import listen_at

CURE = "Give --address, or let these hosts connect to each other"
REACH_S = 2.0
"""Seconds to wait for one connection between two hosts."""


class Reach(NamedTuple):
    """The outcome of one host's try to reach one address of the first host.

    Args:
        address: that was tried.
        source: this host's own address on the way there; None where there is no way.
        problem: empty where there is none.
    """

    address: str
    source: str | None
    problem: str


def listeners(addresses: Sequence[str]) -> dict[str, socket.socket]:
    """Return a socket at each address of this host, without those that it cannot listen at."""
    found = {}
    for address in addresses:
        with suppress(OSError):
            found[address] = listen_at(address)
    return found


def try_reach(ports: Mapping[str, int]) -> list[Reach]:
    """Return for each address and port of the first host whether this host reaches it.

    All are tried at once. It takes about REACH_S at most.
    """
    if not ports:
        return []
    with ThreadPoolExecutor(len(ports), "reach") as tries:
        return list(tries.map(_try_address, ports, ports.values()))


def _try_address(address: str, port: int) -> Reach:
    try:
        with socket.create_connection((address, port), REACH_S) as connection:
            return Reach(address, str(connection.getsockname()[0]), "")
    except TimeoutError:
        return Reach(address, None, "timed out")
    except OSError as error:
        problem = os.strerror(error.errno) if error.errno else str(error)
        return Reach(address, None, problem.lower())


def local_addresses() -> tuple[HostAddress, ...]:
    """Return this host's addresses of interfaces that are up, without loopback and link-local ones.

    A link-local address means another host on each interface, so it cannot be passed on.

    Raises:
        OSError: the system does not tell them.
    """
    return tuple(one for one in addresses_that_are_up() if _is_offered(one.address))


def _is_offered(text: str) -> bool:
    address = ipaddress.ip_address(text)
    return not (address.is_loopback or address.is_link_local or address.is_unspecified)


def candidate_addresses(
    addresses: Sequence[HostAddress],
    ssh_address: str | None,
    address: str | None = None,
) -> list[str]:
    """Return the addresses at which the first host may be tried, the most promising first.

    Args:
        addresses: of the first host, from its facts.
        ssh_address: from its facts; it comes first if it is among `addresses`. Behind a jump host
            or a translation of addresses it may be one that the other hosts do not reach.
        address: the user's choice; an address of the first host.

    Raises:
        UsageError: the host has no such address.
    """
    if address is not None:
        return [_chosen_address(addresses, address)]
    # Hosts without a network are one machine in a test, and meet on its loopback interface.
    own = [one.address for one in addresses] or ["127.0.0.1"]
    return sorted(own, key=lambda one: one != ssh_address)


def _chosen_address(addresses: Sequence[HostAddress], text: str) -> str:
    try:
        chosen = ipaddress.ip_address(text)
    except ValueError:
        raise UsageError(f"--address {text}: give an IPv4 or IPv6 address, not a name.") from None
    own = [one.address for one in addresses]
    if str(chosen) not in own and not chosen.is_loopback:
        raise UsageError(
            f"--address {text}: the first host has {', '.join(own) or 'no address'}. "
            "Give one of these, or leave it out."
        )
    return str(chosen)


def choose_address(
    first: str, candidates: Sequence[str], reports: Mapping[str, Sequence[Reach]]
) -> str | list[str]:
    """Return the first candidate that all hosts reach; else who cannot reach what.

    Args:
        first: the name of the first host.
        candidates: its addresses at which it listens, the most promising first.
        reports: the outcomes of each other host, by its name. Without other hosts the first
            candidate is chosen.
    """
    problems = {
        host: {one.address: one.problem for one in reaches if one.problem}
        for host, reaches in reports.items()
    }
    for address in candidates:
        if not any(address in unreached for unreached in problems.values()):
            return address
    lines = []
    for host, unreached in problems.items():
        if unreached:
            tried = "; ".join(f"{address}: {problem}" for address, problem in unreached.items())
            lines.append(f"{host} cannot reach {first} ({tried}). {CURE}")
    return lines
