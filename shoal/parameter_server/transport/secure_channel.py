"""Authenticated frames over one connection, straight from and into the memory of tensors.

    │ header, 44 bytes │ MAC, 16 │ payload, `length` bytes │ MAC, 16 │
                                                            └ with `authenticate_payload`, if there
                                                              is a payload

    send     [header with the next sequence number][its MAC][payload] ── one system call
    receive  1 header and MAC   2 is the MAC right?   3 the next number?   4 not too long?
             5 `place` returns the memory for the payload   6 payload   7 its MAC, if it has one

A header's MAC is HMAC-SHA256 under the key of this session and direction, cut to 16 bytes. A
payload's MAC is of header and payload, by the best code that both ends know (`mac.py`). So a frame
of another session or of the other direction, repeated, left out or out of order, is refused before
anything in it is used. After any error the connection is closed."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal.errors import ConnectionLost, WireError
from shoal.parameter_server.transport.frame import HEADER_BYTES, Header, pack, unpack
from shoal.parameter_server.transport.handshake import Session
from shoal.parameter_server.transport.mac import MAC_BYTES, Mac, macs
from shoal.parameter_server.transport.socket_io import (
    SharedSocket,
    receive_all,
    send_all,
    send_nonblocking,
    set_socket_options,
)

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_CHUNK_BYTES = 256 * 1024
"""Chunk of an authenticated payload: it stays in the cache between the MAC and the socket."""
_EMPTY = memoryview(b"")


class SecureChannel:
    """A channel of frames to and from one peer.

    Any number of threads may send, one may receive, and any may close it.

    Args:
        sock: a connected TCP or Unix stream socket without a timeout; the channel closes it. With
            TCP, nothing is delayed, and a peer that has acknowledged or read nothing for 30 s is
            lost.
        session: the result of the handshake.
        authenticate_payload: payloads have a MAC too, as headers always have. Both ends must give
            the same value.
        limit_bytes: the longest payload that is sent or accepted.
    """

    def __init__(
        self, sock: socket.socket, session: Session, *, authenticate_payload: bool, limit_bytes: int
    ) -> None:
        set_socket_options(sock)
        self._socket = SharedSocket(sock)
        self._authenticate_payload = authenticate_payload
        self._limit_bytes = limit_bytes
        self._send_mac = hmac.new(session.send_key, digestmod=hashlib.sha256)
        self._receive_mac = hmac.new(session.receive_key, digestmod=hashlib.sha256)
        self._send_payload_mac = macs(session.mac, session.send_key)
        self._receive_payload_mac = macs(session.mac, session.receive_key)
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._sent = 0  # frames, and so the next sequence number
        self._received = 0
        self._partly_sent_bytes = 0  # of the next frame
        self._head = memoryview(bytearray(HEADER_BYTES + MAC_BYTES))

    def send(self, header: Header, payload: ReadableBuffer = b"") -> None:
        """Send one frame, and return when the operating system has it.

        Args:
            header: its `length` is overwritten by the payload's size.
            payload: any C-contiguous buffer; not copied, so it must not change before this returns.

        Raises:
            WireError: the payload is above the limit; nothing was sent.
            ConnectionLost: the peer has gone, or the channel is closed.
        """
        body = flat(payload)
        check_length(len(body), self._limit_bytes, "to send")
        with self._sending:
            packed = pack(header._replace(length=len(body)), self._sent)
            head = packed + _tag(self._send_mac, packed)
            with self._socket as sock:
                if self._partly_sent_bytes:
                    send_all(sock, (head + body)[self._partly_sent_bytes :])
                elif body and self._authenticate_payload:
                    mac = self._send_payload_mac(self._sent)
                    mac.update(packed)
                    _send_authenticated(sock, head, body, mac)
                else:
                    send_all(sock, head, body)
            self._count_sent()

    def try_send(self, header: Header, payload: bytes = b"") -> bool:
        """Send one small frame if the operating system takes it at once.

        Returns:
            Whether the frame is sent. If not, the next frame must be this one, by `send`: some of
            it may be sent already.

        Raises:
            ConnectionLost: the peer has gone, or the channel is closed.
        """
        if (payload and self._authenticate_payload) or not self._sending.acquire(blocking=False):
            return False
        try:
            packed = pack(header._replace(length=len(payload)), self._sent)
            frame = packed + _tag(self._send_mac, packed) + payload
            with self._socket as sock:
                self._partly_sent_bytes = send_nonblocking(sock, frame)
            if self._partly_sent_bytes < len(frame):
                return False
            self._count_sent()
            return True
        finally:
            self._sending.release()

    def receive(
        self, place: Callable[[Header], memoryview | bytearray | None]
    ) -> tuple[Header, memoryview]:
        """Wait for one frame, in one thread at a time.

        Args:
            place: is called for a frame with a payload, after its header is authenticated. It
                returns writable memory of exactly `header.length` bytes, or None for new memory.
                With `authenticate_payload`, the content of that memory is invalid after a
                WireError.

        Returns:
            The header, and the payload as flat bytes, in the memory of `place`.

        Raises:
            WireError: the frame is not the peer's next one, too long, or damaged; the channel is
                then closed.
            ConnectionLost: the peer has gone, also between two frames, or the channel is closed.
        """
        if not self._receiving.acquire(blocking=False):
            raise AssertionError("two threads receive on one channel")
        try:
            with self._socket as sock:
                return self._receive(sock, place)
        finally:
            self._receiving.release()

    def close(self) -> None:
        """Close the connection, from any thread. A blocked `send` or `receive` of either end fails
        at once.
        """
        self._socket.close()

    def _count_sent(self) -> None:
        self._sent += 1
        self._partly_sent_bytes = 0

    def _receive(
        self, sock: socket.socket, place: Callable[[Header], memoryview | bytearray | None]
    ) -> tuple[Header, memoryview]:
        receive_all(sock, self._head)
        packed, tag = self._head[:HEADER_BYTES], self._head[HEADER_BYTES:]
        if not hmac.compare_digest(_tag(self._receive_mac, packed), tag):
            raise WireError(
                "a frame's header is damaged or not the peer's. The connection was closed"
            )
        header, sequence = unpack(packed)
        if sequence != self._received:
            raise WireError(
                f"frame {sequence} came in place of frame {self._received}: repeated, lost or out "
                "of turn"
            )
        self._received += 1
        check_length(header.length, self._limit_bytes, "to receive")
        if header.length == 0:
            return header, _EMPTY
        body = memory(place(header), header.length)
        if self._authenticate_payload:
            mac = self._receive_payload_mac(sequence)
            mac.update(packed)
            _receive_authenticated(sock, body, mac)
        else:
            receive_all(sock, body)
        return header, body


def check_length(length_bytes: int, limit_bytes: int, what_for: str) -> None:
    """Raise WireError for a payload above the limit."""
    if length_bytes > limit_bytes:
        raise WireError(
            f"a frame {what_for} has {length_bytes} bytes of payload; the limit is {limit_bytes}. "
            "Send it in parts, or give both ends a higher limit"
        )


def is_loopback(sock: socket.socket) -> bool:
    """Return whether a socket's peer is on this host: Unix, or TCP to 127.0.0.0/8 or ::1.

    Raises:
        ConnectionLost: the peer has gone.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return True
    try:
        host = ipaddress.ip_address(sock.getpeername()[0])
    except OSError as error:
        raise ConnectionLost(f"the peer has gone ({error})") from error
    mapped = host.ipv4_mapped if isinstance(host, ipaddress.IPv6Address) else None
    return (mapped or host).is_loopback


def flat(payload: ReadableBuffer) -> memoryview:
    """Return the bytes of a C-contiguous buffer, without a copy."""
    view = memoryview(payload)
    return view.cast("B") if view.nbytes else _EMPTY  # a shape with a zero in it cannot be cast


def memory(placed: memoryview | bytearray | None, length_bytes: int) -> memoryview:
    """Return the memory of a payload: the result of `place`, or new memory.

    Raises:
        WireError: the memory has another length.
    """
    body = flat(bytearray(length_bytes) if placed is None else placed)
    if len(body) != length_bytes:
        raise WireError(
            f"the peer sent {length_bytes} bytes for a place of {len(body)}. The two differ in the "
            "model"
        )
    return body


def _tag(keyed: hmac.HMAC, packed: ReadableBuffer) -> bytes:
    mac = keyed.copy()
    mac.update(packed)
    return mac.digest()[:MAC_BYTES]


def _send_authenticated(sock: socket.socket, head: bytes, body: memoryview, mac: Mac) -> None:
    # By chunks, so that the peer authenticates one while this end authenticates the next.
    for start in range(0, len(body), _CHUNK_BYTES):
        chunk = body[start : start + _CHUNK_BYTES]
        mac.update(chunk)
        is_last = start + len(chunk) == len(body)
        send_all(sock, head if start == 0 else b"", chunk, mac.tag() if is_last else b"")


def _receive_authenticated(sock: socket.socket, body: memoryview, mac: Mac) -> None:
    for start in range(0, len(body), _CHUNK_BYTES):
        chunk = body[start : start + _CHUNK_BYTES]
        receive_all(sock, chunk)
        mac.update(chunk)
    tag = memoryview(bytearray(MAC_BYTES))
    receive_all(sock, tag)
    if not hmac.compare_digest(mac.tag(), tag):
        raise WireError("a frame's payload is damaged or not the peer's. The connection was closed")
