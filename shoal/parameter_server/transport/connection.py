"""Who stands at the other end of a connection: what is small is said at once, the rest by a thread,
in a wise order.

worker   ORDER, then gradients as they came      A server that knows the order steps a part as soon as it is there,
                                                 and sends its values back while the next part comes
                                                 in.
server   values, the first part's first          The last part that a backward pass is done with is the first that
                                                 the next forward pass waits for.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import queue
import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from shoal.errors import WireError
from shoal.parameter_server.codec import Op, as_bytes
from shoal.parameter_server.transport.frame import Header
from shoal.parameter_server.transport.secure_channel import SecureChannel

Payload = bytes | Tensor
INLINE_SEND_BYTES = 4096
"""What may be sent by whoever has it to say."""


class QueuedConnection:
    """Sends without making the caller wait for the peer; a slow reader holds up nobody else.

    Tensors are sent from their own memory: they must not change until the peer has answered.

    Attributes:
        reader_done: is set by the one reader when it will read no more.
    """

    def __init__(self, channel: SecureChannel, name: str) -> None:
        self.channel, self.name = channel, name
        self._queue: queue.PriorityQueue[tuple[float, int, tuple[Header, Payload] | None]] = (
            queue.PriorityQueue()
        )
        self._number = itertools.count()
        self._posting, self._unsent = threading.Lock(), 0
        self.reader_done = threading.Event()
        self._thread = threading.Thread(target=self._send_all, name=f"to {name}", daemon=True)
        self._thread.start()

    def post(self, op: int, payload: Payload = b"", **fields: int) -> None:
        """Send a frame, now if it is small and nothing waits: to wake the thread takes longer
        than to send it.
        """
        length = len(payload) if isinstance(payload, bytes) else payload.numel() * payload.itemsize
        header = Header(op, length, **fields)
        with self._posting:
            turn = _priority(header)
            if not self._unsent and length <= INLINE_SEND_BYTES and isinstance(payload, bytes):
                if self._is_sent(header, payload):
                    return
                turn = -math.inf  # of a frame that has begun
            self._unsent += 1
            self._queue.put((turn, next(self._number), (header, payload)))

    def receive(self, place: Callable[[Header], Any]) -> tuple[Header, memoryview]:
        """The next frame; one reader only. Raises WireError."""
        return self.channel.receive(place)

    def close(self, flush: bool = False) -> None:
        """Hang up; what is queued is sent first if `flush`."""
        self._queue.put((math.inf, next(self._number), None))
        if flush:
            self._thread.join(timeout=5)
        self.channel.close()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    def _is_sent(self, header: Header, payload: bytes) -> bool:
        try:
            return self.channel.try_send(header, payload)
        except WireError:
            return (
                True  # nothing can be sent any more, and the reader of this connection learns of it
            )

    def _send_all(self) -> None:
        while (item := self._queue.get()[2]) is not None:
            header, payload = item
            try:
                self.channel.send(
                    header, payload if isinstance(payload, bytes) else as_bytes(payload)
                )
            except BaseException as error:
                with contextlib.suppress(OSError):
                    self.channel.close()  # the reader of this connection learns of it
                if not isinstance(error, WireError):
                    raise
                return
            with self._posting:
                self._unsent -= 1


def _priority(header: Header) -> float:
    """Of those that wait, the frame with the smallest goes first; among equals, the one that
    came first.
    """
    if header.op == Op.STEP:
        return -1
    return header.partition if header.op == Op.PARAMS else 0
