"""A server's place among the replicas of its shard: what the arbiter says, its lease, and its links
to backups.

arbiter ── VIEW ──> follow: primary, backup, or out
   └──── BEAT ──> the lease of a primary, counted from when its beat was sent
primary ── FILL, APPLY ──> backup;  primary <── ACKNOWLEDGE ── backup
primary ── GIVE ──> primary of another shard, which tells the arbiter: HELD
"""

from __future__ import annotations

import json
import logging
import threading
import time
from typing import Any, Protocol

from shoal.errors import WireError
from shoal.parameter_server.codec import FIRST_SERVER, Op, pack_partition
from shoal.parameter_server.coordinator.coordinator import Address, View
from shoal.parameter_server.coordinator.placement import Placement
from shoal.parameter_server.coordinator.watch import ClusterWatcher
from shoal.parameter_server.events import (
    InstallSnapshot,
    PartitionTransfer,
    ReplicateUpdate,
    TransferDone,
)
from shoal.parameter_server.transport.connection import QueuedConnection
from shoal.parameter_server.transport.frame import Header
from shoal.parameter_server.transport.settings import Transport

HEARTBEATS_PER_LEASE = 8
log = logging.getLogger("shoal.server")


class MembershipHandler(Protocol):
    """Receiver of what a membership learns. It is called in threads of the membership's."""

    def on_view(self, view: View) -> None:
        """Handle a view of this server's shard, once this server is a member."""

    def on_placement(self, placement: Placement) -> None:
        """Handle a placement."""

    def on_acknowledged(self, backup: int, part: int, clock: int, filled: bool) -> None:
        """Handle a backup's word that it has all updates of a part before `clock`.

        Args: filled: the backup has answered a whole part, not an update.
        """

    def on_lease_renewed(self) -> None:
        """Handle the answer to a beat."""

    def on_removed(self) -> None:
        """Handle the end of the membership: the arbiter counts on this server no more."""

    def status(self) -> dict[str, Any]:
        """Return what a user may want to know of this server. Every beat tells the arbiter."""


class Membership:
    """One server's membership.

    Args:
        server, shard: its number, and that of what it holds.
        here: where it listens.
        arbiter: where the arbiter does.
        transport: settings of the job.
        lease_s: how long this server may be silent before another takes over.
    """

    def __init__(
        self,
        server: int,
        shard: int,
        here: Address,
        arbiter: Address,
        transport: Transport,
        lease_s: float,
    ) -> None:
        self.server, self.shard, self.here = server, shard, here
        self.transport, self.lease_s = transport, lease_s
        self.view = View(shard)
        self.links: dict[int, QueuedConnection] = {}
        self._joined = threading.Event()
        self._sent: dict[int, float] = {}
        self._leased_until = 0.0
        self._arbiter = arbiter
        self.views: ClusterWatcher

    def begin(self, handler: MembershipHandler) -> None:
        """Connect to the arbiter, and tell `handler` what it says from now on."""
        self._handler = handler
        self.views = ClusterWatcher(
            FIRST_SERVER + self.server,
            self._arbiter,
            self.transport,
            first=self._introduce,
            changed=self._on_view,
            placed=handler.on_placement,
            answered=self._answered,
        )
        self.views.begin()
        threading.Thread(target=self._heartbeat_loop, daemon=True).start()

    @property
    def is_primary(self) -> bool:
        return self.view.primary == self.server

    @property
    def has_lease(self) -> bool:
        """Whether no other server can be the primary now."""
        return time.monotonic() < self._leased_until

    def connect_to(self, server: int, address: Address | None) -> QueuedConnection | None:
        """A connection to another server, if it is there."""
        if address is None:
            return None
        try:
            own_number = FIRST_SERVER + self.server
            channel = self.transport.connect(address, server, own_number, self.lease_s / 2)
        except (OSError, WireError) as error:
            log.info("server %d cannot reach server %d: %s", self.server, server, error)
            return None
        return QueuedConnection(channel, f"server {server}")

    def add_backup_link(self, backup: int, peer: QueuedConnection) -> None:
        """A replica is going to be filled."""
        self.links[backup] = peer
        threading.Thread(target=self._listen, args=(backup, peer), daemon=True).start()

    def drop(self, backup: int) -> None:
        """Hang up on a replica."""
        self.links.pop(backup).close()

    def replicate(self, message: ReplicateUpdate | InstallSnapshot) -> None:
        """Send an update to a backup, under the epoch that this server believes in."""
        link = self.links.get(message.backup)
        if link is None:
            return
        epoch = self.view.epoch
        if isinstance(message, InstallSnapshot):
            payload = pack_partition(message.values, list(message.state), message.steps_by_worker)
            link.post(Op.SNAPSHOT, payload, partition=message.part, step=message.clock, epoch=epoch)
            return
        update = message.update
        about: dict[str, Any] = {
            "worker": update.worker,
            "step": update.step,
            "present": update.grad_mask.hex(),
            "settings": message.settings,
        }
        link.post(Op.UPDATE_META, json.dumps(about).encode(), partition=message.part)
        link.post(
            Op.REPLICATE, update.gradient, partition=message.part, step=message.clock, epoch=epoch
        )

    def primary_of(self, shard: int) -> tuple[int, Address] | None:
        """Another shard's primary and where it listens, if it has one."""
        view = self.views.wait_for_view(shard, 0.0, lambda view: view.primary is not None)
        return (
            None
            if view is None or view.primary is None
            else (view.primary, view.addresses[view.primary])
        )

    def give(self, given: PartitionTransfer, since: int, peer: QueuedConnection) -> None:
        """Send a part to another shard's primary."""
        payload = pack_partition(given.values, list(given.state), given.steps_by_worker)
        peer.post(Op.TRANSFER, payload, partition=given.part, step=given.clock, epoch=since)

    def report_transfer(self, adopted: TransferDone) -> None:
        """Tell the arbiter of a part that has come."""
        self.views.post(
            Op.TRANSFERRED,
            partition=adopted.part,
            epoch=adopted.start_version,
            worker=adopted.source,
        )

    def in_sync(self, backup: int) -> None:
        """Tell the arbiter of a backup that was filled."""
        self.views.post(Op.IN_SYNC, partition=self.shard, worker=backup, epoch=self.view.epoch)

    def _introduce(self, peer: QueuedConnection) -> None:
        if self._joined.is_set():
            return  # the next beat tells
        host, port = self.here
        joining = {"shard": self.shard, "address": [host, port], "facts": self._handler.status()}
        peer.post(Op.JOIN, json.dumps(joining).encode())

    def _on_view(self, view: View) -> None:
        if view.shard != self.shard:
            return
        member = self.server in view.members
        if self._joined.is_set() and not member:
            self._handler.on_removed()
        if member:
            self.view = view
            self._joined.set()
            self._handler.on_view(view)

    def _heartbeat_loop(self) -> None:
        number = 0
        # and no longer: before its first beat is answered, a primary answers nobody
        self._joined.wait()
        while True:
            number += 1
            self._sent = {
                n: at for n, at in self._sent.items() if n > number - 4 * HEARTBEATS_PER_LEASE
            }
            self._sent[number] = time.monotonic()
            self.views.post(Op.HEARTBEAT, json.dumps(self._handler.status()).encode(), step=number)
            time.sleep(self.lease_s / HEARTBEATS_PER_LEASE)

    def _answered(self, header: Header) -> None:
        if header.op == Op.HEARTBEAT:
            self._leased_until = max(
                self._leased_until, self._sent.get(header.step, 0.0) + self.lease_s
            )
            self._handler.on_lease_renewed()
        elif header.op in (Op.REFUSED, Op.LEAVE):
            self._handler.on_removed()

    def _listen(self, backup: int, link: QueuedConnection) -> None:
        try:
            while True:
                header, _ = link.receive(lambda _: None)
                if header.op == Op.REFUSED:
                    log.info(
                        "server %d was replaced: its backup %d follows another", self.server, backup
                    )
                    continue
                self._handler.on_acknowledged(
                    backup, header.partition, header.step, bool(header.flags)
                )
        except WireError:
            link.close()
            if self.links.get(backup) is link:
                del self.links[backup]  # it is tried again, as long as the arbiter counts on it
