"""A connection whose frames are queued and sent by a thread, in an order of priority.

worker   STEP first, then gradients as they came    A server that has the step request steps each
                                                    partition as soon as its gradient is there, and
                                                    sends its values while the next gradient comes.
server   values, the first partition's first        The partition that a backward pass finishes last
                                                    is the one that the next forward pass needs
                                                    first.
"""

from __future__ import annotations

import itertools
import math
import queue
import threading

from torch import Tensor

from shoal.errors import WireError
from shoal.parameter_server.codec import Op, as_bytes
from shoal.parameter_server.transport.channel import Channel, Place
from shoal.parameter_server.transport.frame import Header

Payload = bytes | Tensor
_Frame = tuple[Header, bytes | memoryview]
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

    def __init__(self, channel: Channel, name: str) -> None:
        self.channel = channel
        self.name = name
        # An empty frame is the rest of one that is partly sent; None ends the thread.
        self._queue: queue.PriorityQueue[tuple[float, int, _Frame | tuple[()] | None]] = (
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
        body = payload if isinstance(payload, bytes) else as_bytes(payload)
        header = Header(op, len(body), **fields)
        with self._posting:
            if not self._unsent and isinstance(body, bytes) and len(body) <= INLINE_SEND_BYTES:
                if not self._try_send(header, body):
                    self._put(-math.inf, ())  # the rest of the frame must come next
                return
            self._put(_priority(header), (header, body))

    def receive(self, place: Place) -> tuple[Header, memoryview]:
        """Wait for the next frame, in one thread only; see `Channel.receive`."""
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

    def _put(self, priority: float, frame: _Frame | tuple[()]) -> None:
        self._unsent += 1
        self._queue.put((priority, next(self._sequence), frame))

    def _run(self) -> None:
        while (frame := self._queue.get()[2]) is not None:
            try:
                if frame:
                    self.channel.send(*frame)
                else:
                    self.channel.flush()
            except BaseException as error:
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
