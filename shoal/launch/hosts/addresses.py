"""The addresses by which hosts reach each other, found by connections that are tried.

    driver                agent of the first host           agents of all others
      | ------- listen at these addresses ---->  |                  |
      | <------ ports ---------------------------|                  |
      | ------- reach these addresses and ports ------------------> | try_reach
      |                    <======= a connection to each address == |
      | <------ the problem with each, or none -------------------- |
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

from shoal.errors import LaunchError, UsageError
from shoal.platform.interfaces import addresses_that_are_up, route_interface
from shoal.platform.sockets import listen_at, own_address_towards

CURE = "Give --address, or let these hosts connect to each other"
REACH_S = 2.0
"""Seconds to wait for one connection between two hosts."""


def listeners(addresses: Sequence[str]) -> dict[str, socket.socket]:
    """Return a socket at each address of this host, without those that it cannot listen at."""
    found = {}
    for address in addresses:
        with suppress(OSError):
            found[address] = listen_at(address)
    return found


def try_reach(ports: Mapping[str, int]) -> dict[str, str]:
    """Return why this host does not reach each address and port of the first; empty if it does.

    All are tried at once. It takes about REACH_S at most.
    """
    with ThreadPoolExecutor(len(ports) or 1, "reach") as tries:
        return dict(zip(ports, tries.map(_try_address, ports, ports.values()), strict=True))


def _try_address(address: str, port: int) -> str:
    try:
        socket.create_connection((address, port), REACH_S).close()
    except TimeoutError:
        return "timed out"
    except OSError as error:
        return (os.strerror(error.errno) if error.errno else str(error)).lower()
    return ""


def network_variables(address: str) -> dict[str, str]:
    """Return the variables by which ranks of this host find their network.

    Args: address: of the first host, at which all ranks meet.
    """
    own = own_address_towards(address)
    interface = "lo" if own.startswith("127.") else route_interface(own)
    if interface is None:
        return {"SHOAL_ADDRESS": own}
    return {
        "SHOAL_ADDRESS": own,
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": f"={interface}",
    }


def local_addresses() -> list[str]:
    """Return this host's addresses of interfaces that are up, without loopback and link-local ones.

    A link-local address means another host on each interface, so it cannot be passed on.

    Raises:
        OSError: the system does not tell them.
    """
    found = [ipaddress.ip_address(one.address) for one in addresses_that_are_up()]
    return [str(one) for one in found if not (one.is_loopback or one.is_link_local)]


def candidate_addresses(
    addresses: Sequence[str],
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
    if address is None:
        # Hosts without a network are one machine in a test, and meet on its loopback interface.
        return sorted(addresses or ["127.0.0.1"], key=lambda one: one != ssh_address)
    if address not in (*addresses, "127.0.0.1", "::1"):
        raise UsageError(
            f"--address {address}: the first host has {', '.join(addresses) or 'no address'}. "
            "Give one of these, or leave it out."
        )
    return [address]


def choose_address(
    first: str, ports: Mapping[str, int], reports: Mapping[str, Mapping[str, str]]
) -> str:
    """Return the first address that all hosts reach.

    Args:
        first: the name of the first host.
        ports: by the addresses at which it listens, the most promising first.
        reports: what `try_reach` returns on each other host, by its name. Without other hosts the
            first address is chosen.

    Raises:
        LaunchError: there is none; the message says who cannot reach what.
    """
    for address in ports:
        if not any(problems[address] for problems in reports.values()):
            return address
    lines = ["The hosts cannot reach each other:"]
    for host, problems in reports.items():
        unreached = [f"{address}: {text}" for address, text in problems.items() if text]
        if unreached:
            lines.append(f"{host} cannot reach {first} ({'; '.join(unreached)}). {CURE}")
    raise LaunchError("\n  ".join(lines))
