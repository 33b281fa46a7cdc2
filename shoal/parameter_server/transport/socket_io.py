"""Messages of exact length over a stream socket, and a socket that several threads share.

send_all      [header][payload][MAC] ── one sendmsg ──▶ the peer; never joined, so never copied
receive_all   the peer ── recv_into ──▶ memory of the caller

SharedSocket  receiver ──┐
              senders  ──┴ each inside `with`; close() wakes them all, and the last one that
                           leaves closes the descriptor
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import TracebackType

from shoal.errors import ConnectionLost

KEEPALIVE_TIMEOUT_S = 30
NOT_SENT_BYTES = 256 * 1024
"""Unsent bytes that the system may hold: no frame of a higher priority can overtake these."""
# A peer that has gone must not end this process by SIGPIPE, whatever the user's program does with
# that signal.
_SEND_FLAGS: int = getattr(socket, "MSG_NOSIGNAL", 0)
_DONT_WAIT: int = getattr(socket, "MSG_DONTWAIT", 0)
_RECEIVE_FLAGS = socket.MSG_WAITALL


def set_socket_options(sock: socket.socket) -> None:
    """Set up a TCP socket: send without delay, and end it if the peer is silent for 30 s.

    Silent is a peer that has acknowledged or read nothing. Other sockets are left as they are.

    Raises:
        ConnectionLost: the peer has gone.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    # Not every system has these. TCP_USER_TIMEOUT also ends a send to a peer that is alive but
    # reads nothing.
    options = {
        "TCP_KEEPIDLE": 10,
        "TCP_KEEPINTVL": 5,
        "TCP_KEEPCNT": 4,
        "TCP_USER_TIMEOUT": KEEPALIVE_TIMEOUT_S * 1000,
        "TCP_NOTSENT_LOWAT": NOT_SENT_BYTES,
    }
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name in options.keys() & vars(socket).keys():
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), options[name])
    except OSError as error:
        sock.close()
        raise ConnectionLost(f"the peer has gone ({error})") from error


def send_all(sock: socket.socket, *buffers: bytes | memoryview) -> None:
    """Send flat byte buffers one after another, in one system call where the socket takes them.

    Raises:
        ConnectionLost: the peer has gone.
    """
    try:
        sent = sock.sendmsg(buffers, [], _SEND_FLAGS)
        for buffer in buffers:
            if sent < len(buffer):
                sock.sendall(memoryview(buffer)[sent:], _SEND_FLAGS)
            sent = max(0, sent - len(buffer))
    except OSError as error:
        raise ConnectionLost(f"the connection was lost while sending ({error})") from error


def send_nonblocking(sock: socket.socket, frame: bytes) -> int:
    """Send as much as the socket takes at once; return the number of bytes.

    Raises:
        ConnectionLost: the peer has gone.
    """
    if not _DONT_WAIT:
        return 0
    try:
        return sock.send(frame, _SEND_FLAGS | _DONT_WAIT)
    except BlockingIOError:
        return 0
    except OSError as error:
        raise ConnectionLost(f"the connection was lost while sending ({error})") from error


def receive_all(sock: socket.socket, into: memoryview, deadline_s: float | None = None) -> None:
    """Fill `into`, flat bytes, from the socket.

    Args:
        sock: a blocking socket; its timeout is changed where there is a deadline.
        into: memory for the bytes.
        deadline_s: by `time.monotonic()`; None for no deadline.

    Raises:
        ConnectionLost: the peer has gone, or the deadline has passed.
    """
    received = 0
    try:
        while received < len(into):
            if deadline_s is not None:
                sock.settimeout(max(deadline_s - time.monotonic(), 1e-3))
            count = sock.recv_into(into[received:], 0, _RECEIVE_FLAGS)
            if count == 0:
                raise ConnectionLost(
                    f"the peer closed the connection after {received} of {len(into)} bytes"
                )
            received += count
    except TimeoutError as error:
        raise ConnectionLost(
            f"the peer is silent or too slow: {received} of {len(into)} bytes came in time"
        ) from error
    except OSError as error:
        raise ConnectionLost(
            f"the connection was lost after {received} of {len(into)} bytes ({error})"
        ) from error


class SharedSocket:
    """A connected socket for several threads; use it inside `with`, once in each thread at a time.

    If one thread closed the descriptor while another is about to read from it, the descriptor could
    by then belong to another connection. So `close` only shuts the connection down, which wakes all
    waiting threads, and the last user closes the descriptor. An error inside `with` closes the
    connection too, because part of a message may have been sent."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._users = 0
        self._closed = False

    def __enter__(self) -> socket.socket:
        with self._lock:
            if self._closed:
                raise ConnectionLost("this end has closed the connection")
            self._users += 1
        return self._sock

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.close()
        with self._lock:
            self._users -= 1
            if self._closed and self._users == 0:
                self._sock.close()

    def close(self) -> None:
        """Close the connection for both ends and every thread; a second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            with contextlib.suppress(OSError):  # the peer has closed it before
                self._sock.shutdown(socket.SHUT_RDWR)
            if self._users == 0:
                self._sock.close()
