"""What a worker or a server knows of who holds what: a connection to the arbiter that is made
again when it breaks.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

from shoal.errors import WireError
from shoal.parameter_server.codec import Op, unpack
from shoal.parameter_server.coordinator.coordinator import Address, View
from shoal.parameter_server.coordinator.coordinator_server import ARBITER
from shoal.parameter_server.coordinator.placement import Placement
from shoal.parameter_server.transport.connection import QueuedConnection
from shoal.parameter_server.transport.frame import Header
from shoal.parameter_server.transport.retry import retry_until
from shoal.parameter_server.transport.settings import Transport

RETRY_S = 0.05


class ClusterWatcher:
    """Follows the arbiter, from `begin` on: whoever is told of something has this object by then.

    Args:
        number: who asks: a worker's number, or FIRST_SERVER and a server's.
        first: what is said at the beginning of every connection.
        changed: is called with each view that is new, in the thread that follows.
        placed: likewise with each placement that is new.
        answered: is called with any other frame.

    Attributes:
        over: is set when the arbiter has ended for good: it has said so, or nobody holds its port.
    """

    def __init__(
        self,
        number: int,
        address: Address,
        transport: Transport,
        *,
        first: Callable[[QueuedConnection], None] = lambda _: None,
        changed: Callable[[View], None] = lambda _: None,
        placed: Callable[[Placement], None] = lambda _: None,
        answered: Callable[[Header], None] = lambda _: None,
    ) -> None:
        self._number, self._address, self._transport = number, address, transport.for_arbiter()
        self._first, self._changed, self._placed, self._answered = first, changed, placed, answered
        self._views: dict[int, View] = {}
        self._placement: Placement | None = None
        self._news = threading.Condition()
        self._peer: QueuedConnection | None = None
        self._closed = False
        self.over = threading.Event()

    def begin(self) -> None:
        """Follow from now on, in a thread of this object's."""
        threading.Thread(target=self._follow, name="views", daemon=True).start()

    def wait_for_view(
        self, shard: int, limit_s: float, wanted: Callable[[View], bool]
    ) -> View | None:
        """The view of a shard, once it is as wanted; None when that takes too long."""

        def found() -> bool:
            return shard in self._views and wanted(self._views[shard])

        with self._news:
            return self._views[shard] if self._news.wait_for(found, limit_s) else None

    def known(self) -> list[View]:
        """The newest view of each shard."""
        with self._news:
            return list(self._views.values())

    def placement(self, limit_s: float) -> Placement | None:
        """The newest placement; None when there is none for too long."""
        with self._news:
            self._news.wait_for(lambda: self._placement is not None, limit_s)
            return self._placement

    def post(self, op: Op, payload: bytes = b"", **fields: Any) -> None:
        """Tell the arbiter, if it is there."""
        peer = self._peer
        if peer is not None:
            peer.post(op, payload, **fields)

    def close(self) -> None:
        """Follow no longer."""
        self._closed = True
        if self._peer is not None:
            self._peer.close(flush=True)

    def _follow(self) -> None:
        def attempt() -> None:
            try:
                self._listen(self._connect())
            except ConnectionRefusedError:
                self.over.set()

        broken = (OSError, WireError)
        retry_until(
            math.inf, attempt, every_s=RETRY_S, retried=broken, stopped=lambda: self._closed
        )

    def _connect(self) -> QueuedConnection:
        return QueuedConnection(
            self._transport.connect(self._address, ARBITER, self._number), "arbiter"
        )

    def _listen(self, peer: QueuedConnection) -> None:
        self._peer = peer
        self._first(peer)
        try:
            while True:
                header, payload = peer.receive(lambda _: None)
                if header.op == Op.VIEW:
                    self._on_view(View.from_json(unpack(payload)))
                elif header.op == Op.PLACEMENT:
                    self._on_placement(Placement.from_json(unpack(payload)))
                else:
                    if header.op == Op.LEAVE:
                        self.over.set()
                    self._answered(header)
        finally:
            self._peer = None
            peer.close()

    def _on_view(self, view: View) -> None:
        with self._news:
            known = self._views.get(view.shard)
            if known is not None and known.epoch >= view.epoch:
                return
            self._views[view.shard] = view
            self._news.notify_all()
        self._changed(view)

    def _on_placement(self, placement: Placement) -> None:
        with self._news:
            if self._placement is not None and self._placement.version >= placement.version:
                return
            self._placement = placement
            self._news.notify_all()
        self._placed(placement)
