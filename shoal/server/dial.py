"""How an end of a connection comes about that has proved itself, on the side that calls."""

from __future__ import annotations

import socket
import time

from shoal.server.channel import Channel, is_loopback
from shoal.server.handshake import HANDSHAKE_S, connect
from shoal.server.key import Key
from shoal.server.tls import secured


def dial(
    address: tuple[str, int], key: Key, name: str, number: int, *, limit_bytes: int, limit_s: float = HANDSHAKE_S
) -> Channel:
    """Call whoever listens at `address`.

    Args:
        name: of the job and of its server, as whoever listens has it.
        number: this end's, which the other is told.
        limit_bytes: the longest payload.
        limit_s: how long connecting may take, and how long proving.

    Raises:
        OSError: nobody listens there.
        WireError: who listens is no server of this job, or has hung up.
    """
    connection = socket.create_connection(address, timeout=limit_s)
    secret = not is_loopback(connection)
    begun_s = time.monotonic()
    if key.certificate is not None:
        connection = secured(connection, key.certificate, server_side=False, limit_s=limit_s)
    session = connect(connection, key.secret, name, number, limit_s=limit_s - (time.monotonic() - begun_s))
    return Channel(connection, session, authenticate_payload=secret, limit_bytes=limit_bytes)
