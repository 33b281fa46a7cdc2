"""The newest views and placement, as a worker or a server knows them: a connection to the
coordinator that is made again when it breaks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from shoal.errors import WireError
from shoal.parameter_server.codec import Op, unpack
from shoal.parameter_server.coordinator.coordinator import Address, Placement, View
from shoal.parameter_server.coordinator.coordinator_server import COORDINATOR
from shoal.parameter_server.transport.connection import Connection, Header
from shoal.parameter_server.transport.settings import Transport

RETRY_S = 0.05


class ClusterWatcher:
    """A subscription to the coordinator, from `begin` on. All callbacks run in its thread.

    The thread starts in `begin` and not before, so that a callback may use the object that holds
    this watcher.

    Args:
        number: of the subscriber: a worker's number, or FIRST_SERVER and a server's.
        first: is called with every new connection, before anything is received on it.
        changed: is called with each view that is newer than the one before.
        placed: is called with each placement that is newer than the one before.
        answered: is called with the header of any other frame.

    Attributes:
        over: is set when the coordinator has ended for good: it has sent LEAVE, or nobody listens
            on its port.
    """

    def __init__(
        self,
        number: int,
        address: Address,
        transport: Transport,
        *,
        first: Callable[[Connection], None] = lambda _: None,
        changed: Callable[[View], None] = lambda _: None,
        placed: Callable[[Placement], None] = lambda _: None,
        answered: Callable[[Header], None] = lambda _: None,
    ) -> None:
        self._number = number
        self._address = address
        self._transport = transport
        self._first = first
        self._changed = changed
        self._placed = placed
        self._answered = answered
        self._views: dict[int, View] = {}
        self._placement: Placement | None = None
        self._updated = threading.Condition()
        self._peer: Connection | None = None
        self._closed = False
        self.over = threading.Event()

    def begin(self) -> None:
        """Connect to the coordinator, in a thread of this object, and stay connected."""
        threading.Thread(target=self._run, name="views", daemon=True).start()

    def wait_for_view(
        self, shard: int, limit_s: float, wanted: Callable[[View], bool]
    ) -> View | None:
        """Return the view of a shard, once `wanted` accepts it; None after `limit_s`."""

        def is_accepted() -> bool:
            return shard in self._views and wanted(self._views[shard])

        with self._updated:
            return self._views[shard] if self._updated.wait_for(is_accepted, limit_s) else None

    def known(self) -> list[View]:
        """Return the newest view of each shard."""
        with self._updated:
            return list(self._views.values())

    def post(self, op: Op, payload: bytes = b"", **fields: Any) -> None:
        """Send a frame to the coordinator. While it cannot be reached, the frame is dropped."""
        peer = self._peer
        if peer is not None:
            peer.post(op, payload, **fields)

    def close(self) -> None:
        """End the subscription."""
        self._closed = True
        if self._peer is not None:
            self._peer.close(flush=True)

    def _run(self) -> None:
        while not self._closed:
            try:
                self._receive_loop(self._connect())
            except ConnectionRefusedError:
                # A coordinator that is started again keeps its listening socket, so a port on
                # which nobody listens means the end of the job.
                self.over.set()
            except (OSError, WireError):
                pass
            time.sleep(RETRY_S)

    def _connect(self) -> Connection:
        return self._transport.connect(self._address, COORDINATOR, self._number)

    def _receive_loop(self, peer: Connection) -> None:
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
        with self._updated:
            known = self._views.get(view.shard)
            # A connection that was replaced may deliver an older view late.
            if known is not None and known.epoch >= view.epoch:
                return
            self._views[view.shard] = view
            self._updated.notify_all()
        self._changed(view)

    def _on_placement(self, placement: Placement) -> None:
        with self._updated:
            if self._placement is not None and self._placement.version >= placement.version:
                return
            self._placement = placement
            self._updated.notify_all()
        self._placed(placement)
