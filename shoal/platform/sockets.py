"""Sockets at addresses of either family, IPv4 or IPv6, and the directory of Unix sockets."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import time
from multiprocessing import util

log = logging.getLogger("shoal")

BACKLOG = 1024
TEMPORARY_BYTES = 107 - len("/pymp-12345678/listener-12345678")
"""Longest TMPDIR under which multiprocessing's sockets have an address: unix(7) gives it 108."""

NOTE_S = 2.0
"""Seconds after which a wait for an address is told."""


def listen_at(address: str) -> socket.socket:
    """Return a socket that listens at an IP address of this host, and a port of the system's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=BACKLOG)


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


def wait_for_address(host: str, wait_s: float) -> None:
    """Return when a name has an address here: a name server may learn of a new host late.

    A wait of more than `NOTE_S` is told.

    Raises: OSError: it has none within `wait_s`.
    """
    start_s, is_told = time.monotonic(), False
    limit = start_s + wait_s
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except socket.gaierror:
            if time.monotonic() >= limit:
                raise
            if time.monotonic() >= start_s + NOTE_S and not is_told:
                is_told = True
                log.warning(
                    "note: waits up to %.0f s for a name server that knows %s, where rank 0 is met",
                    wait_s,
                    host,
                )
        time.sleep(0.5)


def make_socket_directory() -> None:
    """Let multiprocessing make its directory of sockets elsewhere if TMPDIR is too long a name.

    Child processes inherit it, so it serves the fork server, ranks and their loader workers.
    """
    chosen = tempfile.gettempdir()
    if len(os.fsencode(chosen)) <= TEMPORARY_BYTES:
        return
    places = [place for place in ("/tmp", "/var/tmp", "/dev/shm") if os.access(place, os.W_OK)]
    try:
        tempfile.tempdir = places[0] if places else chosen
        util.get_temp_dir()
    finally:
        tempfile.tempdir = chosen
