"""Bytes over a connected socket that several threads share: plain, or under TLS.

    sender     [header][payload] ── one sendmsg ──▶ the peer; never joined, so never copied
    receiver   the peer ── recv_into ──▶ memory of the caller
    any        close() wakes them all, and the last one that leaves closes the descriptor

    TLS        [header][payload] ── encrypt 256 KiB ──▶ memory ── send ──▶ the peer

OpenSSL reads and writes memory, not the socket, so that a thread that waits for the peer holds no
lock of OpenSSL's.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from typing import cast

from shoal.errors import ConnectionLost, WireError

KEEPALIVE_TIMEOUT_S = 30
NOT_SENT_BYTES = 256 * 1024
"""Unsent bytes that the system may hold: no frame of a higher priority can overtake these."""
_CHUNK_BYTES = 256 * 1024
"""Bytes that are encrypted or received at once: they stay in the cache."""
KEY_LIMIT_BYTES = 2**38
"""Bytes under one key of TLS: AES-GCM is for 2**24.5 records of 16 KiB (RFC 8446, 5.5)."""
_RECORD_BYTES = 2**14 + 2**8 + 5
"""Longest record of TLS 1.3 with its header (RFC 8446, 5.2)."""
# A peer that has gone must not end this process by SIGPIPE, whatever the user's program does with
# that signal.
_SEND_FLAGS: int = getattr(socket, "MSG_NOSIGNAL", 0)  # Linux has it


class Stream:
    """Bytes to and from one peer. One thread at a time sends, one receives, and any may close it.

    If one thread closed the descriptor while another is about to read from it, the descriptor could
    by then belong to another connection. So `close` only shuts the connection down, which wakes all
    waiting threads, and the last user closes the descriptor. An error closes the connection too,
    because part of a message may have been sent.

    Args:
        sock: a connected TCP or Unix stream socket; this object closes it. With TCP, nothing is
            delayed, and a peer that has acknowledged or read nothing for 30 s is lost.

    Raises:
        ConnectionLost: in each method: the peer has gone, or the stream is closed.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._users = 0
        self._closed = False
        self._unsent = b""  # of `try_send`
        with self._open():
            _set_options(sock)

    def send(self, *buffers: bytes | memoryview) -> None:
        """Send flat byte buffers one after another, and return when the system has them."""
        if self._unsent:
            buffers, self._unsent = (self._unsent, *buffers), b""
        if not buffers:
            return
        with self._open() as sock:
            sent = sock.sendmsg(buffers, [], _SEND_FLAGS)
            for buffer in buffers:
                if sent < len(buffer):
                    sock.sendall(memoryview(buffer)[sent:], _SEND_FLAGS)
                sent = max(0, sent - len(buffer))

    def try_send(self, data: bytes) -> bool:
        """Send what the system takes at once, and return whether that is all.

        If not, the next `send` sends the rest first, and must come before another `try_send`.
        """
        with self._open() as sock:
            try:
                sent = sock.send(data, _SEND_FLAGS | socket.MSG_DONTWAIT)
            except BlockingIOError:
                sent = 0
        self._unsent = data[sent:]
        return not self._unsent

    def receive(self, into: memoryview, deadline_s: float | None = None) -> None:
        """Fill `into`, flat bytes.

        Args: deadline_s: by `time.monotonic()`; None for no deadline.
        """
        received = 0
        with self._open() as sock:
            while received < len(into):
                received += _receive_some(sock, into[received:], deadline_s)

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

    @contextlib.contextmanager
    def _open(self) -> Iterator[socket.socket]:
        """Yield the socket, whose descriptor stays open inside; an error closes the connection."""
        with self._lock:
            if self._closed:
                raise ConnectionLost("this end has closed the connection")
            self._users += 1
        try:
            yield self._sock
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise ConnectionLost(f"the connection was lost ({error})") from error
            raise
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._closed and self._users == 0:
                self._sock.close()


class TlsStream(Stream):
    """A stream under TLS. Its handshake is made in the constructor.

    Args:
        deadline_s: of the handshake, by `time.monotonic()`.

    Raises:
        WireError: the peer has not the certificate of this job, or speaks no TLS.
    """

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, server_side: bool, deadline_s: float
    ) -> None:
        super().__init__(sock)
        self._arriving = ssl.MemoryBIO()
        self._leaving = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._arriving, self._leaving, server_side)
        self._calls = threading.Lock()  # the two directions share their state
        self._encrypted_bytes = 0
        self._chunk = memoryview(bytearray(4096))
        while not self._shake_hands():
            self._receive_chunk(deadline_s)
        self._chunk = memoryview(bytearray(_CHUNK_BYTES))

    def send(self, *buffers: bytes | memoryview) -> None:
        super().send()
        for buffer in buffers:
            for start in range(0, len(buffer), _CHUNK_BYTES):
                super().send(self._encrypted(buffer[start : start + _CHUNK_BYTES]))

    def try_send(self, data: bytes) -> bool:
        return super().try_send(self._encrypted(data))

    def receive(self, into: memoryview, deadline_s: float | None = None) -> None:
        while into := into[self._decrypt(into) :]:
            # At least so many bytes are still to come: what is encrypted is longer, and OpenSSL
            # itself holds a record at most.
            present_bytes = self._arriving.pending + _RECORD_BYTES
            self._receive_chunk(deadline_s, len(into) - present_bytes)

    def _shake_hands(self) -> bool:
        """Take the handshake as far as what has arrived allows; return whether it is done."""
        is_done, problem = False, ""
        try:
            self._tls.do_handshake()
            is_done = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLCertVerificationError:
            problem = (
                "the peer has another certificate than this job's. Check host and port, and start "
                "all ranks of a job by one command"
            )
        except ssl.SSLError as error:
            problem = (
                f"the peer does not speak this end's TLS ({error.reason}). Check host and port, "
                "and give all ranks one Shoal and one setting of encrypt"
            )
        super().send(self._leaving.read())  # a message of the handshake, or why it has failed
        if problem:
            self.close()
            raise WireError(problem)
        return is_done

    def _encrypted(self, data: bytes | memoryview) -> bytes:
        self._encrypted_bytes += len(data)
        if self._encrypted_bytes > KEY_LIMIT_BYTES:
            self.close()  # as after any loss, both ends connect again, and then have new keys
            raise ConnectionLost(f"{KEY_LIMIT_BYTES} bytes were encrypted under one key of TLS")
        with self._calls:
            while data:
                data = data[self._tls.write(data) :]
            return self._leaving.read()

    def _decrypt(self, into: memoryview) -> int:
        """Fill `into` as far as what has arrived allows; return the number of bytes."""
        received = 0
        try:
            with self._calls:
                while received < len(into):
                    # mypy's stubs do not know that it returns a number where there is a buffer
                    received += cast(int, self._tls.read(len(into) - received, into[received:]))
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self.close()
            raise WireError(f"what came is damaged or not the peer's ({error.reason})") from error
        return received

    def _receive_chunk(self, deadline_s: float | None, expected_bytes: int = 0) -> None:
        """Receive what has come; of a large payload wait for all that it still lacks."""
        into, flags = self._chunk, 0
        if expected_bytes > 0:
            into, flags = into[:expected_bytes], socket.MSG_WAITALL
        with self._open() as sock:
            count = _receive_some(sock, into, deadline_s, flags)
        self._arriving.write(into[:count])


def _receive_some(
    sock: socket.socket,
    into: memoryview,
    deadline_s: float | None,
    flags: int = socket.MSG_WAITALL,
) -> int:
    """Receive into the beginning of `into`; return the number of bytes, which is not 0."""
    if deadline_s is not None:
        sock.settimeout(max(deadline_s - time.monotonic(), 1e-3))
    count = sock.recv_into(into, 0, flags)
    if deadline_s is not None:
        sock.settimeout(None)
    if count == 0:
        raise ConnectionLost("the peer closed the connection")
    return count


def _set_options(sock: socket.socket) -> None:
    """Send without delay over TCP, and end the connection if the peer is silent for 30 s.

    Silent is a peer that has acknowledged or read nothing. Other sockets are left as they are.
    """
    sock.settimeout(None)
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    # Not every system has these. TCP_USER_TIMEOUT also ends a send to a peer that is alive but
    # reads nothing.
    options = {
        "TCP_NODELAY": 1,
        "TCP_KEEPIDLE": 10,
        "TCP_KEEPINTVL": 5,
        "TCP_KEEPCNT": 4,
        "TCP_USER_TIMEOUT": KEEPALIVE_TIMEOUT_S * 1000,
        "TCP_NOTSENT_LOWAT": NOT_SENT_BYTES,
    }
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name in options.keys() & vars(socket).keys():
        sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), options[name])
