"""A connection whose frames are queued and sent by a thread, in an order of priority.

worker   STEP first, then gradients as they came    A server that has the step request steps each
                                                    partition as soon as its gradient is there, and
                                                    sends its values while the next gradient comes.
server   values, the first partition's first        The partition that a backward pass finishes last
                                                    is the one that the next forward pass needs
                                                    first.
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
"""Bound on a frame that the caller's thread may send itself."""


class QueuedConnection:
    """A connection with a queue of frames to send: the caller never waits for a slow peer.

    Tensors are sent from their own memory, so they must not change before the peer has answered.

    Args:
        channel: of one peer; this object closes it.
        name: of the peer, for the name of the thread.

    Attributes:
        reader_done: is set by the one reader when it will read no more.
    """

    def __init__(self, channel: SecureChannel, name: str) -> None:
        self.channel = channel
        self.name = name
        self._queue: queue.PriorityQueue[tuple[float, int, tuple[Header, Payload] | None]] = (
            queue.PriorityQueue()
        )
        self._sequence = itertools.count()
        self._posting = threading.Lock()
        self._unsent = 0
        self.reader_done = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"to {name}", daemon=True)
        self._thread.start()

    def post(self, op: int, payload: Payload = b"", **fields: int) -> None:
        """Send a frame: now if it is small and the queue is empty, else by the thread.

        To wake the thread takes longer than to send a small frame.

        Args:
            payload: of a tensor, its memory is sent; it is flat, contiguous and on the CPU.
            fields: of the frame's header.
        """
        length = len(payload) if isinstance(payload, bytes) else payload.numel() * payload.itemsize
        header = Header(op, length, **fields)
        with self._posting:
            priority = _priority(header)
            if not self._unsent and length <= INLINE_SEND_BYTES and isinstance(payload, bytes):
                if self._try_send(header, payload):
                    return
                priority = -math.inf  # some of the frame may be sent: the rest must come next
            self._unsent += 1
            self._queue.put((priority, next(self._sequence), (header, payload)))

    def receive(self, place: Callable[[Header], Any]) -> tuple[Header, memoryview]:
        """Wait for the next frame, in one thread only; see `SecureChannel.receive`."""
        return self.channel.receive(place)

    def close(self, flush: bool = False) -> None:
        """Close the connection.

        Args:
            flush: send the queued frames first, for 5 s at most.
        """
        self._queue.put((math.inf, next(self._sequence), None))
        if flush:
            self._thread.join(timeout=5)
        self.channel.close()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    def _try_send(self, header: Header, payload: bytes) -> bool:
        try:
            return self.channel.try_send(header, payload)
        except WireError:
            # Nothing can be sent any more. The reader of this connection gets the error.
            return True

    def _run(self) -> None:
        while (item := self._queue.get()[2]) is not None:
            header, payload = item
            try:
                self.channel.send(
                    header, payload if isinstance(payload, bytes) else as_bytes(payload)
                )
            except BaseException as error:
                with contextlib.suppress(OSError):
                    self.channel.close()  # ends the reader of this connection
                if not isinstance(error, WireError):
                    raise
                return
            with self._posting:
                self._unsent -= 1


def _priority(header: Header) -> float:
    """Return the priority of a frame; the smallest goes first, and of equals the oldest."""
    if header.op == Op.STEP:
        return -1
    return header.partition if header.op == Op.PARAMS else 0
