"""Connected sockets, streams and connections for the tests of the transport."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from shoal.parameter_server.transport.connection import Connection, Header, Payload
from shoal.parameter_server.transport.key import Key, can_encrypt, tls_context
from shoal.parameter_server.transport.stream import Stream, TlsStream

KEY = bytes(range(32))
needs_tls = pytest.mark.skipif(
    not can_encrypt(), reason="TLS takes the package cryptography, which is not installed"
)
TLS = pytest.param("tls", marks=needs_tls)
KINDS = ("tcp", "unix", TLS)
MIB = 1 << 20


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


def stream_of(sock: socket.socket, kind: str, server_side: bool) -> Stream:
    if kind != "tls":
        return Stream(sock)
    context = tls_context(Key(KEY), server_side)
    return TlsStream(sock, context, server_side, time.monotonic() + 10)


@contextlib.contextmanager
def streams(kind: str = "unix") -> Iterator[tuple[Stream, Stream]]:
    with sockets(kind) as (first, second), beside(stream_of, second, kind, True) as accepting:
        ours = stream_of(first, kind, False)
        with contextlib.closing(ours), contextlib.closing(accepting.result()) as theirs:
            yield ours, theirs


@contextlib.contextmanager
def connections(
    kind: str = "unix", limit_bytes: int = 8 * MIB
) -> Iterator[tuple[Connection, Connection]]:
    with streams(kind) as (first, second):
        ours = Connection(first, limit_bytes, "peer")
        theirs = Connection(second, limit_bytes, "peer")
        with contextlib.closing(ours), contextlib.closing(theirs):
            yield ours, theirs


def send(connection: Connection, header: Header, payload: Payload = b"") -> None:
    fields = header._asdict()
    del fields["length"]
    connection.post(fields.pop("op"), payload, **fields)


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
