"""One server's membership of its shard: the coordinator's views, and the lease.

coordinator ── VIEW ───────> this server is primary, backup, or removed
   └────────── HEARTBEAT ──> the lease of a primary, counted from when it sent its own heartbeat

Of all that a server says to others, `replication.py` sends what goes to backups, and `migration.py`
what goes to other shards.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from typing import TYPE_CHECKING

from shoal.errors import WireError
from shoal.parameter_server.codec import FIRST_SERVER, Op
from shoal.parameter_server.coordinator.coordinator import Address, View
from shoal.parameter_server.coordinator.watch import ClusterWatcher
from shoal.parameter_server.events import TransferDone
from shoal.parameter_server.transport.connection import Connection, Header

if TYPE_CHECKING:
    from shoal.parameter_server.node.node_server import ServerConfig, ServerNode

HEARTBEATS_PER_LEASE = 8
log = logging.getLogger("shoal.server")


class Membership:
    """One server's membership of its shard.

    Args:
        address: where the server listens.
        node: gets the events of the membership, in its threads.

    Attributes:
        view: the newest view that names this server.
    """

    def __init__(self, config: ServerConfig, address: Address, node: ServerNode) -> None:
        self.server = config.server
        self.shard = config.shard
        self.transport = config.transport
        self.lease_s = config.settings.lease_s
        self.view = View(config.shard)
        self._address = address
        self._coordinator = config.coordinator
        self._handler = node
        self._joined = threading.Event()
        self._lease_end_s = 0.0
        self._watcher: ClusterWatcher

    def start(self) -> None:
        """Connect to the coordinator, and inform the node from now on."""
        self._watcher = ClusterWatcher(
            FIRST_SERVER + self.server,
            self._coordinator,
            self.transport,
            first=self._send_join,
            changed=self._on_view,
            placed=lambda placement: self._handler.migration.on_placement(placement),
            answered=self._on_answer,
        )
        self._watcher.begin()
        threading.Thread(target=self._heartbeat_loop, daemon=True).start()

    # Role and lease

    @property
    def is_primary(self) -> bool:
        return self.view.primary == self.server

    @property
    def has_lease(self) -> bool:
        """Return whether no other server can be the primary now."""
        return time.monotonic() < self._lease_end_s

    # Other servers

    def connect_to(self, server: int, address: Address | None) -> Connection | None:
        """Connect to another server; None if it cannot be reached now."""
        if address is None:
            return None
        try:
            number = FIRST_SERVER + self.server
            return self.transport.connect(address, server, number, self.lease_s / 2)
        except (OSError, WireError) as error:
            log.info("server %d cannot reach server %d: %s", self.server, server, error)
            return None

    def primary_of(self, shard: int) -> tuple[int, Address] | None:
        """Return another shard's primary and its address; None while it has no primary."""
        view = self._watcher.wait_for_view(shard, 0.0, lambda view: view.primary is not None)
        if view is None or view.primary is None:
            return None
        return view.primary, view.addresses[view.primary]

    # The coordinator

    def report_transfer(self, message: TransferDone) -> None:
        """Report a partition that has arrived here and on every backup."""
        self._watcher.post(
            Op.TRANSFERRED,
            partition=message.part,
            epoch=message.start_version,
            worker=message.source,
        )

    def report_in_sync(self, backup: int) -> None:
        """Report a replica that has all snapshots, so may become a backup."""
        self._watcher.post(Op.IN_SYNC, partition=self.shard, worker=backup, epoch=self.view.epoch)

    def _send_join(self, peer: Connection) -> None:
        if self._joined.is_set():
            return  # after a reconnection, the next heartbeat is enough
        host, port = self._address
        request = {"shard": self.shard, "address": [host, port], "facts": self._handler.status()}
        peer.post(Op.JOIN, json.dumps(request).encode())

    def _on_view(self, view: View) -> None:
        if view.shard != self.shard:
            return
        is_member = self.server in view.members
        if self._joined.is_set() and not is_member:
            self._handler.acceptor.close()
        if is_member:
            self.view = view
            self._joined.set()
            self._handler.on_view(view)

    def _heartbeat_loop(self) -> None:
        # A primary has no lease before its first heartbeat is answered, so begin at once.
        self._joined.wait()
        while True:
            status = json.dumps(self._handler.status()).encode()
            # Its answer has the same step.
            self._watcher.post(Op.HEARTBEAT, status, step=time.monotonic_ns())
            time.sleep(self.lease_s / HEARTBEATS_PER_LEASE)

    def _on_answer(self, header: Header) -> None:
        if header.op == Op.HEARTBEAT:
            # Counted from when the heartbeat was sent: the coordinator counts from when it came.
            self._lease_end_s = max(self._lease_end_s, header.step * 1e-9 + self.lease_s)
            self._handler.on_lease_renewed()
        elif header.op in (Op.REFUSED, Op.LEAVE):
            self._handler.acceptor.close()
