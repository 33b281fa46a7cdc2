"""How the processes of a job reach each other, from the launcher's settings down to a connection.

    launcher ── Transport ──> server    accept a connection, as the listener of that name
                  └─────────> worker    connect to the listener of that name

    one machine        Unix socket without a file; each end asks the kernel for the other's user
    between machines   TCP, and TLS 1.3 with the job's certificate at both ends (`key.py`)
    encrypt=false      TCP alone: who can listen reads everything, the pass below too

Then the worker's end says who it is and to whom it wants to talk, and the listener answers:

    worker    magic, version, number, pass = HMAC-SHA256(key, job and listener)
    listener  magic, version; then 1, or 0 if the pass is that of another job or listener

Magic and version stay the first six bytes in all versions to come, so that each version can
recognise the others.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shoal.errors import ConnectionLost, WireError
from shoal.parameter_server.codec import PLACEMENT_BYTES
from shoal.parameter_server.partitioning import Partition
from shoal.parameter_server.transport.connection import Connection
from shoal.parameter_server.transport.key import Key, tls_context
from shoal.parameter_server.transport.stream import Stream, TlsStream
from shoal.platform.sockets import BACKLOG, listen_at

UNIX = "unix"
"""Host in the address of a Unix socket of this machine; its port is the socket's name."""
HANDSHAKE_S = 5.0
MAGIC = b"SHPS"
VERSION = 5
_START = struct.Struct("<4sH")
_HELLO = struct.Struct("<I32s")
_NOT_WELCOME, _WELCOME = b"\0", b"\1"
_CREDENTIALS = struct.Struct("3i")  # of the peer: process, user, group
_STATE_FACTOR = 8
"""Bound on a partition with its optimizer state, as a multiple of its values. Adam needs three."""
_MAX_METADATA_BYTES = 2**20


@dataclass(frozen=True)
class Transport:
    """Connections between the processes of one job.

    A listener is a server of the job, named by its number, or the coordinator.

    Args:
        key: proves that a process belongs to the job.
        job: the job's name, the same at both ends.
        limit_bytes: the longest payload that is sent or accepted. The default is enough for the
            coordinator's messages.
        encrypt: use TLS between machines.
    """

    key: Key
    job: str
    limit_bytes: int = PLACEMENT_BYTES
    encrypt: bool = True

    def for_parts(self, parts: Sequence[Partition]) -> Transport:
        """Return these settings with a limit that fits any partition with its optimizer state."""
        largest_bytes = max((part.size_bytes for part in parts), default=0)
        state_bytes = _STATE_FACTOR * largest_bytes + _MAX_METADATA_BYTES
        return replace(self, limit_bytes=max(state_bytes, PLACEMENT_BYTES))

    def connect(
        self,
        address: tuple[str, int],
        listener: int | str,
        number: int,
        limit_s: float = HANDSHAKE_S,
    ) -> Connection:
        """Connect to a listener of the job.

        Args:
            listener: number of a server, or the coordinator's name.
            number: of this end, for the listener.
            limit_s: for the connection, and again for the handshake.

        Raises:
            OSError: nobody listens at `address`.
            WireError: the listener is not that of this job, or has closed the connection.
        """
        sock = _connected(address, limit_s)
        deadline_s = time.monotonic() + limit_s
        stream = self._stream(sock, False, deadline_s)
        with _closed_on_error(stream):
            stream.send(_START.pack(MAGIC, VERSION), _HELLO.pack(number, self._pass_for(listener)))
            _receive_start(stream, "server", deadline_s)
            if _receive(stream, 1, "server", deadline_s) != _WELCOME:
                raise WireError(
                    f"the peer is not listener '{listener}' of job '{self.job}'. Connect to the "
                    "address of this job's server"
                )
        return Connection(stream, self.limit_bytes, str(listener))

    def accept(self, sock: socket.socket, listener: int | str) -> tuple[Connection, int]:
        """Make the handshake of an accepted connection, and close it if that fails.

        Args:
            listener: the name of this end, for which the peer must have asked.

        Returns:
            The connection, and the number that the peer has given.

        Raises:
            WireError: the peer does not have the key, is of another user, job or version, is silent
                or gone.
        """
        deadline_s = time.monotonic() + HANDSHAKE_S
        stream = self._stream(sock, True, deadline_s)
        with _closed_on_error(stream):
            stream.send(_START.pack(MAGIC, VERSION))
            _receive_start(stream, "worker", deadline_s)
            hello = _receive(stream, _HELLO.size, "worker", deadline_s)
            number, told = _HELLO.unpack(hello)
            if not hmac.compare_digest(told, self._pass_for(listener)):
                stream.send(_NOT_WELCOME)
                raise WireError("the peer asks for a listener of another name. It was refused")
            stream.send(_WELCOME)
        return Connection(stream, self.limit_bytes, str(number)), number

    def _stream(self, sock: socket.socket, server_side: bool, deadline_s: float) -> Stream:
        """Return the stream of a new connection, whose peer has proved what the network asks."""
        if sock.family == socket.AF_UNIX:
            _check_user(sock)
        elif self.encrypt:
            return TlsStream(sock, tls_context(self.key, server_side), server_side, deadline_s)
        return Stream(sock)

    def _pass_for(self, listener: int | str) -> bytes:
        return hmac.digest(self.key.secret, f"{self.job}/{listener}".encode(), "sha256")


def listen(host: str) -> socket.socket:
    """Return a listening socket at an IP address of this host, or a Unix one if `host` is UNIX.

    The system chooses the port, or the name in the abstract namespace: there is no file, so nothing
    is left when the process ends.
    """
    if host != UNIX:
        return listen_at(host)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")
    listener.listen(BACKLOG)
    return listener


def address_of(listener: socket.socket) -> tuple[str, int]:
    """Return the address for `Transport.connect` of a socket of `listen`."""
    name = listener.getsockname()
    if listener.family != socket.AF_UNIX:
        return name[0], name[1]
    return UNIX, int(name[1:], 16)  # a zero byte, and five hexadecimal digits


def _connected(address: tuple[str, int], limit_s: float) -> socket.socket:
    host, port = address
    if host != UNIX:
        return socket.create_connection(address, timeout=limit_s)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(limit_s)
        sock.connect(f"\0{port:05x}")
    except OSError:
        sock.close()
        raise
    return sock


def _check_user(sock: socket.socket) -> None:
    """Close a Unix socket, and raise WireError, unless the peer is a process of the same user."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.geteuid():
        sock.close()
        raise WireError(f"the peer is a process of user {user}, not yours. It was refused")


@contextlib.contextmanager
def _closed_on_error(stream: Stream) -> Iterator[None]:
    try:
        yield
    except BaseException:
        stream.close()
        raise


def _receive_start(stream: Stream, peer: str, deadline_s: float) -> None:
    # These bytes alone, because a peer of another version may send another length.
    magic, version = _START.unpack(_receive(stream, _START.size, peer, deadline_s))
    if magic != MAGIC:
        raise WireError(
            f"the peer is no Shoal {peer}: it begins with {magic!r}. Check host and port, and give "
            "all ranks one setting of encrypt"
        )
    if version != VERSION:
        raise WireError(
            f"the {peer} speaks version {version} of the wire, this end {VERSION}. Run one Shoal "
            "on both"
        )


def _receive(stream: Stream, size_bytes: int, peer: str, deadline_s: float) -> bytes:
    message = bytearray(size_bytes)
    try:
        stream.receive(memoryview(message), deadline_s)
    except ConnectionLost as error:
        raise ConnectionLost(
            f"no handshake: {error}. The peer is no Shoal {peer}, or it refused this end: its log "
            "says why"
        ) from error
    return bytes(message)
