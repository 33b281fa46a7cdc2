"""Sockets at addresses of either family, IPv4 or IPv6."""

from __future__ import annotations

import socket


def listen_at(address: str, port: int = 0, backlog: int = 1024) -> socket.socket:
    """Return a socket that listens at an IP address of this host.

    Args: port: 0 for one that the system chooses.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=backlog)


def own_address_towards(host: str) -> str:
    """Return the IP address of the interface by which this host reaches another one.

    Of a name with addresses of both families, IPv4 is taken where there is a route to it.

    Args: host: a name or an address of either family.

    Raises: OSError: no route leads to any address of the host.
    """
    # UDP sends nothing here. Port 9 is that of discarded messages.
    found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    errors: list[OSError] = []
    for family, kind, protocol, _, address in sorted(
        found, key=lambda one: one[0] != socket.AF_INET
    ):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)
            except OSError as error:  # a name may have an address of a family that has no route
                errors.append(error)
                continue
            return str(probe.getsockname()[0])
    raise errors[0]
