"""Migration of partitions between shards: the old owner sends them, the new owner loads them.

  coordinator  placement: partition 3 migrates a -> b        placement: shard b owns partition 3
  shard a      stops to answer for it ── TRANSFER ─┐         frees its memory, once every worker
                                                   │         has used the values that it read here
  shard b                                          └─> fills its backups ── TRANSFERRED ──> coord.

`coordinator.py` says which partition migrates, and since which version of the placement.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from shoal.parameter_server.codec import FIRST_SERVER, Op, pack_partition, unpack_part
from shoal.parameter_server.coordinator.coordinator import Move, Placement
from shoal.parameter_server.events import Outgoing, PartitionCopy
from shoal.parameter_server.transport.connection import Header

if TYPE_CHECKING:
    from shoal.parameter_server.node.node_server import ServerNode


class Migration:
    """One server's side of the migrations from and to its shard.

    Args: node: whose lock is held while its shard is used.
    """

    def __init__(self, node: ServerNode) -> None:
        self._node = node
        self._shard = node.shard
        self._membership = node.membership
        # A transfer without effect is sent again after twice this time.
        self._lease_s = node.config.settings.lease_s
        self._placement_changed = threading.Condition(node.lock)
        self._placement: Placement | None = None
        # Of the newest transfer of each partition: server, start version, and when it was sent.
        self._sent: dict[int, tuple[int, int, float]] = {}
        self._removed: dict[int, dict[int, int]] = {}

    def on_placement(self, placement: Placement) -> None:
        """Answer for the partitions that this shard owns now, and send those that leave it."""
        with self._node.lock:
            self._placement = placement
            self._placement_changed.notify_all()
            shard = self._node.config.shard
            owned = placement.owned_by(shard)
            leaving = owned & set(placement.moving)
            arriving = placement.arriving_at(shard)
            self._removed |= self._shard.set_ownership(owned, leaving, arriving)
            self.free_removed()
        self.send_departing()

    # As the new owner

    def await_placement(self, version: int) -> None:
        """Wait for a placement, for a lease at most: its sender may have got it first."""
        with self._placement_changed:
            self._placement_changed.wait_for(
                lambda: self._placement is not None and self._placement.version >= version,
                self._lease_s,
            )

    def receive(self, sender: int, header: Header, payload: memoryview) -> list[Outgoing]:
        """As the primary, load a partition that another server sends. The lock is held.

        The coordinator decides whether that server was still allowed to send it.
        """
        if not self._membership.is_primary or header.partition not in self._shard.parts:
            return []
        transfer = PartitionCopy(header.partition, header.step, *unpack_part(payload))
        return self._shard.import_partition(transfer, header.epoch, sender - FIRST_SERVER)

    # As the old owner

    def free_removed(self) -> None:
        """Free the memory of removed partitions that no worker can be reading. The lock is held."""
        for partition, done in list(self._removed.items()):
            if partition in self._shard.held:  # it has migrated back
                del self._removed[partition]
            elif not self._membership.is_primary or self._shard.all_workers_read(done):
                del self._removed[partition]
                self._node.buffers.forget(partition)
                self._node.shared_values.discard(self._shard.parts[partition])

    def send_departing(self) -> None:
        """As the primary, send each leaving partition to its new shard, again if it is overdue."""
        if self._placement is None or not self._membership.is_primary:
            return
        if not self._shard.leaving:
            return
        due: dict[int, list[int]] = {}
        for partition, move in self._placement.moving.items():
            if partition in self._shard.leaving and self._start_transfer(partition, move):
                due.setdefault(move.target, []).append(partition)
        for shard, partitions in due.items():
            sending = threading.Thread(target=self._send_all, args=(shard, partitions), daemon=True)
            sending.start()

    def _start_transfer(self, partition: int, move: Move) -> bool:
        """Register a transfer if one is due: to a new primary, of a new migration, or overdue."""
        target = self._membership.primary_of(move.target)
        if target is None:
            return False
        now_s = time.monotonic()
        *transfer, sent_s = self._sent.get(partition, (-1, -1, 0.0))
        if transfer == [target[0], move.start_version] and now_s - sent_s <= 2 * self._lease_s:
            return False
        self._sent[partition] = target[0], move.start_version, now_s
        return True

    def _send_all(self, shard: int, partitions: list[int]) -> None:
        """Send partitions to the primary of a shard, over a connection of their own."""
        target = self._membership.primary_of(shard)
        peer = None if target is None else self._membership.connect_to(*target)
        if peer is None:
            return
        for partition in partitions:
            with self._node.lock:
                placement = self._placement
                transfer = self._shard.export_partition(partition)
                # The migration may have been cancelled or finished in the meantime.
                if transfer is None or placement is None or partition not in placement.moving:
                    continue
                start_version = placement.moving[partition].start_version
                peer.post(
                    Op.TRANSFER,
                    pack_partition(transfer.values, transfer.state, transfer.steps_by_worker),
                    partition=partition,
                    step=transfer.clock,
                    epoch=start_version,
                )
        peer.close(flush=True)
