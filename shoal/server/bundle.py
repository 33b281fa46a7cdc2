"""Several connections as one: frames in order, and what is large in pieces over all of them at once.

    first connection    │ frame │ STRIPED: a frame's header │ piece 0 │ piece 3 │ ... │ end │ frame │
    second connection                                       │ piece 1 │ piece 5 │ ...
    third connection                                        │ piece 2 │ piece 4 │ ...

For links that one connection does not fill: its window is short for the time of flight, the network holds each flow to
a rate, or one core hashes and encrypts no faster. A connection takes the next piece when it has room, so a slow one
carries less. Each has shaken hands and counts and authenticates its own frames. The loss of one is the loss of all, and
so everything else is as with one connection: what has no answer is said again on new ones.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from shoal.errors import ConnectionLost, WireError
from shoal.server.channel import Channel, flat, memory, refuse_length
from shoal.server.frame import Header, pack, unpack
from shoal.server.messages import Op
from shoal.server.pieces import LEAST_BYTES, Incoming, Outgoing

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

Place = Callable[[Header], memoryview | bytearray | None]


class Bundle:
    """What a `Channel` is, over several: any number of threads send, one receives, any closes.

    Args:
        channels: two or more to one peer, in the same order at both ends. What is small goes over the first.
        limit_bytes: the longest payload that is sent or accepted.
    """

    def __init__(self, channels: Sequence[Channel], limit_bytes: int) -> None:
        self._first, *self._others = channels
        self._count, self._limit_bytes = len(channels), limit_bytes
        self._sending = threading.Lock()
        self._sent = self._received = 0
        self._news = threading.Condition()
        self._incoming: Incoming | None = None
        self._failure: BaseException | None = None
        self._open = len(self._others)
        self._to_send: list[queue.SimpleQueue[Outgoing | None]] = [queue.SimpleQueue() for _ in self._others]
        self._readers = [_thread("pieces in", self._read, other) for other in self._others]
        for other, waiting in zip(self._others, self._to_send, strict=True):
            _thread("pieces out", self._send_pieces, other, waiting)

    def send(self, header: Header, payload: ReadableBuffer = b"") -> None:
        """Send one frame; as `Channel.send`."""
        body = flat(payload)
        with self._sending:
            if len(body) <= LEAST_BYTES:
                self._first.send(header, body)
                return
            refuse_length(len(body), self._limit_bytes, "to send")
            self._first.send(Header(Op.STRIPED), pack(header._replace(length=len(body)), self._sent))
            pieces = Outgoing(self._sent, body, self._count)
            self._sent += 1
            self._hand_out(pieces)
            self._send_over(self._first, pieces)
            pieces.wait()
            if self._failure is not None:
                raise self._lost()
            self._first.send(Header(Op.PIECE))

    def offer(self, header: Header, payload: bytes = b"") -> bool:
        """Send a small frame if nobody has to wait; as `Channel.offer`."""
        if not self._sending.acquire(blocking=False):
            return False
        try:
            return self._first.offer(header, payload)
        finally:
            self._sending.release()

    def receive(self, place: Place) -> tuple[Header, memoryview]:
        """Wait for one frame; as `Channel.receive`. After an error nothing is written to any place any more."""
        try:
            header, payload = self._first.receive(lambda found: None if found.op == Op.STRIPED else place(found))
            return (header, payload) if header.op != Op.STRIPED else self._receive_pieces(payload, place)
        except BaseException as error:
            self._fail(error)
            for reader in self._readers:
                reader.join()
            if isinstance(error, WireError):
                raise self._lost() from error
            raise

    def finish(self) -> None:
        """Nothing more will be sent: the ends of all but the first connection are then no loss to the peer."""
        with self._sending, contextlib.suppress(WireError):
            for other in self._others:
                other.send(Header(Op.PIECE))

    def close(self) -> None:
        """End all connections, from any thread; as `Channel.close`."""
        self._fail(ConnectionLost("this end has closed the connections"))

    def _receive_pieces(self, packed: memoryview, place: Place) -> tuple[Header, memoryview]:
        header, number = unpack(packed)
        refuse_length(header.length, self._limit_bytes, "to receive")
        if number != self._received:
            raise WireError(f"payload {number} came in place of payload {self._received}")
        incoming = Incoming(number, body := memory(place(header), header.length), self._count)
        with self._news:
            self._received += 1
            self._incoming = incoming
            self._news.notify_all()
        while self._take_piece(self._first, self._place_piece):
            pass
        with self._news:
            self._news.wait_for(lambda: self._failure is not None or not incoming.missing_bytes or not self._open)
            if incoming.missing_bytes:
                raise ConnectionLost(f"the peer hung up with {incoming.missing_bytes} of {len(body)} bytes to come")
            self._incoming = None
        return header, body

    def _take_piece(self, channel: Channel, place: Place) -> bool:
        """Wait for a piece, and let it go where it belongs; False when no more will come there."""
        header, _ = channel.receive(place)
        if header.op != Op.PIECE:
            raise WireError(f"message {header.op} among the pieces of a payload")
        with self._news:
            if header.length and self._incoming is not None:
                self._incoming.missing_bytes -= header.length
                self._news.notify_all()
        return bool(header.length)

    def _place_later(self, header: Header) -> memoryview:
        """A connection may be ahead of the first, which says where things go."""
        with self._news:
            self._news.wait_for(lambda: self._failure is not None or self._received > header.step)
            if self._failure is not None:
                raise self._lost()
        return self._place_piece(header)

    def _place_piece(self, header: Header) -> memoryview:
        with self._news:
            if self._incoming is None or header.op != Op.PIECE:
                raise WireError(f"message {header.op} in place of a piece that has yet to come")
            return self._incoming.place(header)

    def _read(self, channel: Channel) -> None:
        try:
            while self._take_piece(channel, self._place_later):
                pass
        except WireError as error:
            self._fail(error)
        finally:
            with self._news:
                self._open -= 1
                self._news.notify_all()

    def _hand_out(self, pieces: Outgoing) -> None:
        with self._news:  # or a thread that has just ended would be waited for
            if self._failure is not None:
                raise self._lost()
            for waiting in self._to_send:
                waiting.put(pieces)

    def _send_pieces(self, channel: Channel, waiting: queue.SimpleQueue[Outgoing | None]) -> None:
        while (pieces := waiting.get()) is not None:
            self._send_over(channel, pieces)

    def _send_over(self, channel: Channel, pieces: Outgoing) -> None:
        try:
            pieces.send_over(channel)
        except WireError as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """One connection has failed: end all of them."""
        with self._news:
            self._failure = self._failure or error
            for waiting in self._to_send:
                waiting.put(None)
            self._news.notify_all()
        for channel in (self._first, *self._others):
            channel.close()

    def _lost(self) -> WireError:
        """What has ended this, once more, for another thread."""
        found = self._failure
        if isinstance(found, WireError):
            return type(found)(*found.args)
        return ConnectionLost(f"this end has left the peer because of {found!r}")


def _thread(name: str, target: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
    thread.start()
    return thread
