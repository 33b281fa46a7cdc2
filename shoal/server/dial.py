"""How an end of a connection comes about that has proved itself, on the side that calls."""

from __future__ import annotations

import secrets
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from shoal.server.bundle import Bundle
from shoal.server.channel import Channel, is_loopback
from shoal.server.handshake import ALONE, HANDSHAKE_S, Strand, connect
from shoal.server.key import Key
from shoal.server.mac import HMAC, known
from shoal.server.tls import secured


def dial(
    address: tuple[str, int],
    key: Key,
    name: str,
    number: int,
    *,
    limit_bytes: int,
    limit_s: float = HANDSHAKE_S,
    connections: int = 1,
) -> Channel | Bundle:
    """Call whoever listens at `address`.

    Args:
        name: of the job and of its server, as whoever listens has it.
        number: this end's, which the other is told.
        limit_bytes: the longest payload.
        limit_s: how long connecting may take, and how long proving.
        connections: that are used as one.

    Raises:
        OSError: nobody listens there.
        WireError: who listens is no server of this job, or has hung up.
    """
    call = partial(_call, address, key, name, number, limit_bytes, limit_s)
    if connections == 1:
        return call(ALONE)
    talk = secrets.token_bytes(16)
    with ThreadPoolExecutor(connections) as pool:  # or each would wait for the flights of all before it
        coming = [pool.submit(call, Strand(talk, index, connections)) for index in range(connections)]
    failures = [error for each in coming if (error := each.exception()) is not None]
    if failures:
        for each in coming:
            if each.exception() is None:
                each.result().close()
        raise failures[0]
    return Bundle([each.result() for each in coming], limit_bytes)


def _call(
    address: tuple[str, int], key: Key, name: str, number: int, limit_bytes: int, limit_s: float, strand: Strand
) -> Channel:
    connection = socket.create_connection(address, timeout=limit_s)
    secret = not is_loopback(connection)
    begun_s = time.monotonic()
    if key.certificate is not None:
        connection = secured(connection, key.certificate, server_side=False, limit_s=limit_s)
    left_s = limit_s - (time.monotonic() - begun_s)
    own = known() if secret else HMAC
    session = connect(connection, key.secret, name, number, limit_s=left_s, strand=strand, known=own)
    return Channel(connection, session, authenticate_payload=secret, limit_bytes=limit_bytes)
