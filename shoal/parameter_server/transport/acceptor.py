"""A listening socket and its handshakes, which are limited in time and in number.

    connection ──> accept ── handshake, 5 s at most ──┬─> served, in the thread of its handshake
                             64 at once at most:      └─> refused, and counted
                             one more ends the oldest

So a stranger that connects and sends nothing costs a thread and a file descriptor for a while. It
never keeps out a peer of this job, whose handshake takes milliseconds."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable

from shoal.errors import ConnectionLost, WireError
from shoal.parameter_server.transport.connection import Connection
from shoal.parameter_server.transport.settings import Transport

HANDSHAKES = 64
"""Handshakes at one time."""
_RETRY_S = 0.05
"""Pause after a failed accept, for instance without a free file descriptor."""
log = logging.getLogger("shoal.server")


class Acceptor:
    """Accepts connections from peers of a job.

    Args:
        name: of the listener, for the log.
        transport: settings of the job.
        listener_id: the listener's name in the handshake: peers must ask for it.

    Attributes:
        refused: number of refused connections and messages.
    """

    def __init__(
        self, listener: socket.socket, name: str, transport: Transport, listener_id: int | str
    ) -> None:
        self._listener = listener
        self._name = name
        self._transport = transport
        self._listener_id = listener_id
        self._lock = threading.Lock()
        self._handshaking: dict[int, socket.socket] = {}
        self._closed = False
        self.refused = 0

    def accept(self, serve: Callable[[Connection, int], None]) -> None:
        """Accept connections until `close`; call `serve` for each peer, in a thread of its own.

        Args:
            serve: is called with the connection and the number that the peer has given.
        """
        visit = 0
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:  # the peer has gone, or no file descriptor is free
                if not self._closed:
                    log.debug("%s: %s", self._name, error)
                    time.sleep(_RETRY_S)
                continue
            visit += 1
            self._register(visit, connection)
            threading.Thread(
                target=self._handshake, args=(visit, connection, serve), daemon=True
            ).start()

    def close(self) -> None:
        """Accept no more connections; `accept` returns."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def refuse(self, error: Exception) -> None:
        """Count a refusal, and log the 1st, 2nd, 4th, 8th ...

        So a stranger that floods the port does not flood the log.
        """
        with self._lock:
            self.refused += 1
            count = self.refused
        if count & (count - 1) == 0:
            # A worker that was killed hangs up too, and is no stranger.
            level = logging.DEBUG if isinstance(error, ConnectionLost) else logging.WARNING
            log.log(level, "%s has refused %d, the last because: %s", self._name, count, error)

    def _register(self, visit: int, connection: socket.socket) -> None:
        """Register a handshake; if there are too many, end the oldest one."""
        with contextlib.suppress(OSError), self._lock:
            # A duplicate: the descriptor of a closed connection may soon belong to another one.
            self._handshaking[visit] = connection.dup()
            if len(self._handshaking) > HANDSHAKES:
                with self._handshaking.pop(next(iter(self._handshaking))) as oldest:
                    oldest.shutdown(socket.SHUT_RDWR)

    def _handshake(
        self, visit: int, connection: socket.socket, serve: Callable[[Connection, int], None]
    ) -> None:
        try:
            peer, number = self._transport.accept(connection, self._listener_id)
        except WireError as error:
            connection.close()
            self.refuse(error)
            return
        finally:
            with self._lock:
                handle = self._handshaking.pop(visit, None)
            if handle is not None:
                handle.close()
        serve(peer, number)
