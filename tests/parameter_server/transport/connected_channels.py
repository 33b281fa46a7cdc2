"""Connected sockets and channels for the tests of the transport."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from shoal.parameter_server.transport.frame import Header
from shoal.parameter_server.transport.handshake import Session
from shoal.parameter_server.transport.mac import GMAC, HMAC, supported_macs
from shoal.parameter_server.transport.secure_channel import SecureChannel

KEY = bytes(range(32))
KINDS = ("tcp", "unix")
MIB = 1 << 20
needs_gmac = pytest.mark.skipif(
    not supported_macs() & GMAC,
    reason="GMAC takes the package cryptography, which is not installed",
)
every_mac = pytest.mark.parametrize(
    "mac", [HMAC, pytest.param(GMAC, marks=needs_gmac)], ids=["hmac", "gmac"]
)
SESSION = Session(send_key=b"a" * 32, receive_key=b"b" * 32)
PEERS = Session(send_key=b"b" * 32, receive_key=b"a" * 32)


@contextlib.contextmanager
def sockets(kind: str = "unix") -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield two ends of one connection, and close both."""
    if kind == "unix":
        first, second = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            first = socket.create_connection(listener.getsockname())
            second, _ = listener.accept()
    with first, second:
        yield first, second


@contextlib.contextmanager
def channels(
    kind: str = "unix", authenticate: bool = True, limit_bytes: int = 8 * MIB, mac: int = HMAC
) -> Iterator[tuple[SecureChannel, SecureChannel]]:
    with sockets(kind) as (first, second):
        ours = SecureChannel(
            first,
            replace(SESSION, mac=mac),
            authenticate_payload=authenticate,
            limit_bytes=limit_bytes,
        )
        theirs = SecureChannel(
            second,
            replace(PEERS, mac=mac),
            authenticate_payload=authenticate,
            limit_bytes=limit_bytes,
        )
        with contextlib.closing(ours), contextlib.closing(theirs):
            yield ours, theirs


@contextlib.contextmanager
def beside(function: Callable[..., Any], *args: Any, **options: Any) -> Iterator[Future[Any]]:
    """Run `function` in a thread, which has ended when this context ends."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(function, *args, **options)


def new_memory(_header: Header) -> None:
    return None


def read_to_end(sock: socket.socket) -> bytes:
    """All that comes until the peer closes."""
    read = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := sock.recv(1 << 16):
            read += piece
    return read


def frames(
    *sent: tuple[Header, bytes], session: Session = PEERS, authenticate: bool = True
) -> list[bytes]:
    """What a channel with these keys puts on the wire, frame by frame."""
    with (
        sockets() as (first, second),
        contextlib.closing(
            SecureChannel(first, session, authenticate_payload=authenticate, limit_bytes=1 << 62)
        ) as channel,
    ):
        recorded = []
        for header, payload in sent:
            channel.send(header, payload)
            recorded.append(second.recv(1 << 16))
        return recorded
