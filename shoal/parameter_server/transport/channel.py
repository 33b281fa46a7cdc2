"""Frames over one connection, straight from and into the memory of tensors.

│ header, 32 bytes │ payload, `length` bytes │

receive  1 header   2 not too long?   3 `place` returns the memory   4 payload
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal.errors import WireError
from shoal.parameter_server.transport.frame import HEADER_BYTES, Header, pack, unpack
from shoal.parameter_server.transport.stream import Stream

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

Place = Callable[[Header], memoryview | bytearray | None]
_EMPTY = memoryview(b"")


class Channel:
    """A channel of frames to and from one peer.

    One thread at a time may send, one may receive, and any may close it.

    Args:
        stream: to the peer; the channel closes it.
        limit_bytes: the longest payload that is sent or accepted.
    """

    def __init__(self, stream: Stream, limit_bytes: int) -> None:
        self._stream = stream
        self._limit_bytes = limit_bytes
        self._receiving = threading.Lock()
        self._head = memoryview(bytearray(HEADER_BYTES))

    def send(self, header: Header, payload: ReadableBuffer = b"") -> None:
        """Send one frame, and return when the operating system has it.

        Args:
            header: its `length` is overwritten by the payload's size.
            payload: any C-contiguous buffer; not copied, so it must not change before this returns.

        Raises:
            WireError: the payload is above the limit; nothing was sent.
            ConnectionLost: the peer has gone, or the channel is closed.
        """
        body = _flat(payload)
        self._stream.send(self._packed(header, len(body)), body)

    def try_send(self, header: Header, payload: bytes = b"") -> bool:
        """Send what the operating system takes at once of one small frame.

        Returns:
            Whether that is all. If not, `flush` must come before the next frame.

        Raises:
            ConnectionLost: the peer has gone, or the channel is closed.
        """
        return self._stream.try_send(self._packed(header, len(payload)) + payload)

    def flush(self) -> None:
        """Send the rest of a frame that `try_send` has begun."""
        self._stream.send()

    def receive(self, place: Place) -> tuple[Header, memoryview]:
        """Wait for one frame, in one thread at a time.

        Args:
            place: is called for a frame with a payload. It returns writable memory of exactly
                `header.length` bytes, or None for new memory. The content of that memory is invalid
                after an error.

        Returns:
            The header, and the payload as flat bytes, in the memory of `place`.

        Raises:
            WireError: the frame is too long, or damaged; the channel is then closed.
            ConnectionLost: the peer has gone, also between two frames, or the channel is closed.
        """
        if not self._receiving.acquire(blocking=False):
            raise AssertionError("two threads receive on one channel")
        try:
            return self._receive(place)
        except BaseException:
            self.close()
            raise
        finally:
            self._receiving.release()

    def close(self) -> None:
        """Close the connection, from any thread. A blocked `send` or `receive` of either end fails
        at once.
        """
        self._stream.close()

    def _receive(self, place: Place) -> tuple[Header, memoryview]:
        self._stream.receive(self._head)
        header = unpack(self._head)
        self._check_length(header.length)
        if header.length == 0:
            return header, _EMPTY
        placed = place(header)
        body = _flat(bytearray(header.length) if placed is None else placed)
        if len(body) != header.length:
            raise WireError(
                f"the peer sent {header.length} bytes for a place of {len(body)}. The two differ "
                "in the model"
            )
        self._stream.receive(body)
        return header, body

    def _packed(self, header: Header, length_bytes: int) -> bytes:
        self._check_length(length_bytes)
        return pack(header._replace(length=length_bytes))

    def _check_length(self, length_bytes: int) -> None:
        if length_bytes > self._limit_bytes:
            raise WireError(
                f"a frame has {length_bytes} bytes of payload; the limit is {self._limit_bytes}. "
                "Send it in parts, or give both ends a higher limit"
            )


def _flat(payload: ReadableBuffer) -> memoryview:
    """Return the bytes of a C-contiguous buffer, without a copy."""
    view = memoryview(payload)
    return view.cast("B") if view.nbytes else _EMPTY  # a shape with a zero in it cannot be cast
