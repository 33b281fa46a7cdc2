"""A payload in pieces: on its way out, where every connection takes the next one, and on its way in."""

from __future__ import annotations

import threading

from shoal.errors import WireError
from shoal.server.channel import Channel
from shoal.server.frame import Header
from shoal.server.messages import Op

LEAST_BYTES, MOST_BYTES = 16 * 1024, 256 * 1024
_A_CONNECTION = 2


def piece_bytes(length_bytes: int, connections: int) -> int:
    """Of all pieces of a payload but the last. Both ends have to say the same.

    Two for each connection or more, so that a slow one can carry less than its share.
    """
    return min(max(-(-length_bytes // (_A_CONNECTION * connections)), LEAST_BYTES), MOST_BYTES)


class Outgoing:
    """One payload that several threads send.

    Args:
        number: of the payload, among those in pieces.
        body: must not change before `wait` has returned.
        connections: which send it; each calls `send_over` once.
    """

    def __init__(self, number: int, body: memoryview, connections: int) -> None:
        self._number, self._body = number, body
        self._size_bytes = piece_bytes(len(body), connections)
        self._begun, self._sending = 0, connections
        self._news = threading.Condition()

    def send_over(self, channel: Channel) -> None:
        """Send the next piece, until there is none. Raises WireError."""
        try:
            while (index := self._next()) is not None:
                start = index * self._size_bytes
                channel.send(
                    Header(Op.PIECE, step=self._number, part=index), self._body[start : start + self._size_bytes]
                )
        finally:
            with self._news:
                self._sending -= 1
                self._news.notify_all()

    def wait(self) -> None:
        """Until no connection sends of it any more."""
        with self._news:
            self._news.wait_for(lambda: self._sending == 0)

    def _next(self) -> int | None:
        with self._news:
            index = self._begun
            if index * self._size_bytes >= len(self._body):
                return None
            self._begun += 1
            return index


class Incoming:
    """One payload that comes over several connections, into one memory. Not safe by itself: the caller locks.

    Attributes: missing_bytes: that have not come.
    """

    def __init__(self, number: int, body: memoryview, connections: int) -> None:
        self.number, self._body = number, body
        self._size_bytes = piece_bytes(len(body), connections)
        self._taken: set[int] = set()
        self.missing_bytes = len(body)

    def place(self, header: Header) -> memoryview:
        """Where a piece goes. Raises WireError: it is none of this payload's, or comes for the second time."""
        start = header.part * self._size_bytes
        found = self._body[start : start + self._size_bytes]
        if header.step != self.number or header.part in self._taken or header.length != len(found):
            raise WireError(
                f"piece {header.part} of payload {header.step}, of {header.length} bytes, came where payload "
                f"{self.number} has {len(found)} bytes to come: repeated, or not the peer's"
            )
        self._taken.add(header.part)
        return found
