"""The addresses by which hosts reach each other, found by connections that are tried.

    driver                agent of the first host           agents of all others
      | ------- listen at these addresses ---->  |                  |
      | <------ ports ---------------------------|                  |
      | ------- reach these addresses and ports ------------------> | try_reach
      |                    <======= a connection to each address == |
      | <------ a Reach for each address -------------------------- |
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
from typing import Any

from shoal.errors import LaunchError, UsageError
from shoal.platform.interfaces import HostAddress, addresses_that_are_up
from shoal.platform.sockets import listen_at

CURE = "Give --address, or let these hosts connect to each other"
REACH_S = 2.0
"""Seconds to wait for one connection between two hosts."""


Reach = tuple[str | None, str]
"""One host's try to reach an address of the first: its own address on the way there, or None and
the problem."""


def listeners(addresses: Sequence[str]) -> dict[str, socket.socket]:
    """Return a socket at each address of this host, without those that it cannot listen at."""
    found = {}
    for address in addresses:
        with suppress(OSError):
            found[address] = listen_at(address)
    return found


def try_reach(ports: Mapping[str, int]) -> dict[str, Reach]:
    """Return for each address and port of the first host whether this host reaches it.

    All are tried at once. It takes about REACH_S at most.
    """
    with ThreadPoolExecutor(len(ports) or 1, "reach") as tries:
        return dict(zip(ports, tries.map(_try_address, ports, ports.values()), strict=True))


def _try_address(address: str, port: int) -> Reach:
    try:
        with socket.create_connection((address, port), REACH_S) as connection:
            return str(connection.getsockname()[0]), ""
    except TimeoutError:
        return None, "timed out"
    except OSError as error:
        problem = os.strerror(error.errno) if error.errno else str(error)
        return None, problem.lower()


def local_addresses() -> tuple[HostAddress, ...]:
    """Return this host's addresses of interfaces that are up, without loopback and link-local ones.

    A link-local address means another host on each interface, so it cannot be passed on.

    Raises:
        OSError: the system does not tell them.
    """
    found = [(one, ipaddress.ip_address(one.address)) for one in addresses_that_are_up()]
    return tuple(one for one, ip in found if not (ip.is_loopback or ip.is_link_local))


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
    own = [one.address for one in addresses]
    if address is None:
        # Hosts without a network are one machine in a test, and meet on its loopback interface.
        return sorted(own or ["127.0.0.1"], key=lambda one: one != ssh_address)
    if address not in (*own, "127.0.0.1", "::1"):
        raise UsageError(
            f"--address {address}: the first host has {', '.join(own) or 'no address'}. "
            "Give one of these, or leave it out."
        )
    return [address]


def choose_address(
    first: str, ports: Mapping[str, int], reports: Mapping[str, Mapping[str, Sequence[Any]]]
) -> str:
    """Return the first address that all hosts reach.

    Args:
        first: the name of the first host.
        ports: by the addresses at which it listens, the most promising first.
        reports: the fields of each Reach of each other host, by its name and the address. Without
            other hosts the first address is chosen.

    Raises:
        LaunchError: there is none; the message says who cannot reach what.
    """
    for address in ports:
        if all(source for source, _ in (reaches[address] for reaches in reports.values())):
            return address
    lines = ["The hosts cannot reach each other:"]
    for host, reaches in reports.items():
        unreached = [f"{address}: {text}" for address, (_, text) in reaches.items() if text]
        if unreached:
            lines.append(f"{host} cannot reach {first} ({'; '.join(unreached)}). {CURE}")
    raise LaunchError("\n  ".join(lines))
