"""Who is let in: a listening socket, and the handshakes under way on it, limited in time and in
number.

    stranger ──> accept ── handshake, 5 s at most ──┬─> attended, in the thread that shook hands
                           64 at once at most:      └─> refused, and counted
                           one more ends the oldest

So whoever connects and says nothing keeps a thread and a descriptor for a while, and never keeps
out a peer of this job, whose handshake takes milliseconds."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable

from shoal.errors import WireError
from shoal.parameter_server.transport.secure_channel import SecureChannel
from shoal.parameter_server.transport.settings import Transport

HANDSHAKES = 64
_FULL_S = 0.05  # how long to wait where the system has no descriptor for one more connection
log = logging.getLogger("shoal.server")


class Acceptor:
    """Lets peers of a job in.

    Args:
        name: of whoever listens, for the log.
        transport: settings of the job.
        own_name: the name by which peers must ask for this listener.

    Attributes:
        refused: connections and messages so far.
    """

    def __init__(
        self, listener: socket.socket, name: str, transport: Transport, own_name: int | str
    ) -> None:
        self._listener, self._name = listener, name
        self._transport, self._own_name = transport, own_name
        self._lock = threading.Lock()
        self._waiting: dict[int, socket.socket] = {}
        self._closed = False
        self.refused = 0

    def accept(self, attend: Callable[[SecureChannel, int], None]) -> None:
        """Until the door is closed, call `attend(channel, number)` for each peer, in a thread
        of its own.
        """
        visit = 0
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:  # one connection has failed, or there is no descriptor for it
                if not self._closed:
                    log.debug("%s: %s", self._name, error)
                    time.sleep(_FULL_S)
                continue
            visit += 1
            self._enter(visit, connection)
            threading.Thread(
                target=self._handshake, args=(visit, connection, attend), daemon=True
            ).start()

    def close(self) -> None:
        """Let nobody in any more; `admit` returns."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def refuse(self, error: Exception) -> None:
        """Count a refusal. The 1st, 2nd, 4th, 8th ... is logged: whoever floods the port does
        not flood the log.
        """
        with self._lock:
            self.refused += 1
            count = self.refused
        if count & (count - 1) == 0:
            log.warning("%s has refused %d, the last because: %s", self._name, count, error)

    def _enter(self, visit: int, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), self._lock:
            # A handle of our own: the descriptor of a connection that is closed may soon be
            # another's.
            self._waiting[visit] = connection.dup()
            if len(self._waiting) > HANDSHAKES:
                with self._waiting.pop(next(iter(self._waiting))) as oldest:
                    oldest.shutdown(socket.SHUT_RDWR)

    def _handshake(
        self, visit: int, connection: socket.socket, attend: Callable[[SecureChannel, int], None]
    ) -> None:
        try:
            channel, number = self._transport.accept(connection, self._own_name)
        except WireError as error:
            connection.close()
            self.refuse(error)
            return
        finally:
            with self._lock:
                handle = self._waiting.pop(visit, None)
            if handle is not None:
                handle.close()
        attend(channel, number)
