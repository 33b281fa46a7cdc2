"""Frames over one connection, straight from and into the memory of tensors, sent by priority.

    0    1       2          4       8        12          16     24       32
    │ op │ flags │ reserved │ epoch │ worker │ partition │ step │ length │ payload
    │ u8 │ u8    │ u16      │ u32   │ u32    │ u32       │ u64  │ u64    │ `length` bytes

    post      small, and nothing waits ──> sent at once          a thread sends what waits:
              else ──> queue ──> thread ──> the peer             the smallest priority first
    receive   1 header   2 not too long?   3 `place` returns the memory   4 payload

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
import struct
import threading
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from shoal.errors import WireError
from shoal.parameter_server.codec import Op, as_bytes
from shoal.parameter_server.transport.stream import Stream

Payload = bytes | Tensor
INLINE_SEND_BYTES = 4096
"""Bound on a frame that the caller's thread may send itself."""
_EMPTY = memoryview(b"")
_LAYOUT = struct.Struct("<BBxxIIIQQ")
HEADER_BYTES = _LAYOUT.size


class Header(NamedTuple):
    """Fields of a frame's header. A value out of range is a `struct.error` in `pack`.

    Some operations carry other values in fields that they do not need; `codec.py` says which.

    Attributes:
        op: the operation, 0 to 255.
        length: bytes of payload that follow, below 2**64.
        worker: number of the worker that sends or receives it, below 2**32.
        step: the step, or the clock, that it belongs to, below 2**64.
        partition: number of the partition, below 2**32.
        epoch: of the primary in the sender's view, below 2**32.
        flags: eight bits.
    """

    op: int
    length: int = 0
    worker: int = 0
    step: int = 0
    partition: int = 0
    epoch: int = 0
    flags: int = 0


def pack(header: Header) -> bytes:
    """Pack a header into 32 bytes."""
    op, length, worker, step, part, epoch, flags = header
    return _LAYOUT.pack(op, flags, epoch, worker, part, step, length)


def unpack(packed: bytes | bytearray | memoryview) -> Header:
    """Return the header in 32 bytes."""
    op, flags, epoch, worker, part, step, length = _LAYOUT.unpack(packed)
    return Header(op, length, worker, step, part, epoch, flags)


Place = Callable[[Header], memoryview | None]


class Connection:
    """A connection with a queue of frames to send: the caller never waits for a slow peer.

    Any number of threads may post, one may receive, and any may close it.

    Args:
        stream: to the peer; this object closes it.
        limit_bytes: the longest payload that is sent or accepted.
        name: of the peer, for the name of the thread.

    Attributes:
        reader_done: is set by the one reader when it will read no more.
    """

    def __init__(self, stream: Stream, limit_bytes: int, name: str) -> None:
        self._stream = stream
        self._limit_bytes = limit_bytes
        # An empty tuple is the rest of a frame that is partly sent; None ends the thread.
        self._queue: queue.PriorityQueue[tuple[float, int, tuple[bytes | memoryview, ...] | None]]
        self._queue = queue.PriorityQueue()
        self._sequence = itertools.count()
        self._posting = threading.Lock()
        self._unsent = 0
        self._head = memoryview(bytearray(HEADER_BYTES))
        self.reader_done = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"to {name}", daemon=True)
        self._thread.start()

    def post(self, op: int, payload: Payload = b"", **fields: int) -> None:
        """Send a frame: now if it is small and the queue is empty, else by the thread.

        To wake the thread takes longer than to send a small frame. If the peer has gone, the reader
        of this connection gets the error.

        Args:
            payload: of a tensor, its memory is sent, so it must not change before the peer has
                answered; it is flat, contiguous and on the CPU.
            fields: of the frame's header.

        Raises:
            WireError: the payload is above the limit; nothing was sent.
        """
        body = payload if isinstance(payload, bytes) else as_bytes(payload)
        self._check_length(len(body))
        header = Header(op, len(body), **fields)
        with self._posting:
            if self._unsent or not isinstance(body, bytes) or len(body) > INLINE_SEND_BYTES:
                self._put(_priority(header), (pack(header), body))
                return
            with contextlib.suppress(WireError):  # nothing can be sent any more
                if not self._stream.try_send(pack(header) + body):
                    self._put(-math.inf, ())  # the rest of the frame must come next

    def receive(self, place: Place) -> tuple[Header, memoryview]:
        """Wait for one frame, in one thread at a time.

        Args:
            place: is called for a frame with a payload. It returns writable memory of exactly
                `header.length` bytes, flat, or None for new memory. The content of that memory is
                invalid after an error.

        Returns:
            The header, and the payload as flat bytes, in the memory of `place`.

        Raises:
            WireError: the frame is too long, or damaged; the connection is then closed.
            ConnectionLost: the peer has gone, also between two frames, or this end has closed.
        """
        try:
            self._stream.receive(self._head)
            header = unpack(self._head)
            self._check_length(header.length)
            if header.length == 0:
                return header, _EMPTY
            placed = place(header)
            body = memoryview(bytearray(header.length)) if placed is None else placed
            if len(body) != header.length:
                raise WireError(
                    f"the peer sent {header.length} bytes for a place of {len(body)}. The two "
                    "differ in the model"
                )
            self._stream.receive(body)
        except BaseException:
            self.hang_up()
            raise
        return header, body

    def hang_up(self) -> None:
        """End the connection at once: what either end waits for on it fails."""
        self._stream.close()

    def close(self, flush: bool = False) -> None:
        """Close the connection, and wait for its thread.

        Args:
            flush: send the queued frames first, for 5 s at most.
        """
        self._queue.put((math.inf, next(self._sequence), None))
        if flush:
            self._thread.join(timeout=5)
        self.hang_up()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    def _put(self, priority: float, buffers: tuple[bytes | memoryview, ...]) -> None:
        self._unsent += 1
        self._queue.put((priority, next(self._sequence), buffers))

    def _run(self) -> None:
        while (buffers := self._queue.get()[2]) is not None:
            try:
                self._stream.send(*buffers)
            except BaseException as error:
                self.hang_up()  # ends the reader of this connection
                if not isinstance(error, WireError):
                    raise
                return
            with self._posting:
                self._unsent -= 1

    def _check_length(self, length_bytes: int) -> None:
        if length_bytes > self._limit_bytes:
            raise WireError(
                f"a frame has {length_bytes} bytes of payload; the limit is {self._limit_bytes}. "
                "Send it in parts, or give both ends a higher limit"
            )


def _priority(header: Header) -> float:
    """Return the priority of a frame; the smallest goes first, and of equals the oldest."""
    if header.op == Op.STEP:
        return -1
    return header.partition if header.op == Op.PARAMS else 0
