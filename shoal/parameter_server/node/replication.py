"""Replication of a shard: the primary sends each update to its backups, and they acknowledge it.

      primary ── SNAPSHOT: a whole partition, for a new backup ─────────> backup
      primary ── UPDATE_META, REPLICATE: a gradient with its settings ──> backup
      primary <───────────────────────── ACKNOWLEDGE ──────────────────── backup

The coordinator's views say which server is the primary. A backup refuses the messages of a primary
that has been replaced and has not learned of it yet."""

from __future__ import annotations

import json
import logging
import threading
from typing import TYPE_CHECKING, Any

from shoal.errors import WireError
from shoal.parameter_server.codec import FIRST_SERVER, Op, pack_partition, unpack, unpack_part
from shoal.parameter_server.coordinator.coordinator import View
from shoal.parameter_server.events import (
    Acknowledged,
    GradientUpdate,
    InstallSnapshot,
    PartitionCopy,
    ProtocolViolation,
    ReplicateUpdate,
)
from shoal.parameter_server.transport.connection import Connection, Header

if TYPE_CHECKING:
    from shoal.parameter_server.node.node_server import ServerNode

log = logging.getLogger("shoal.server")


class Replication:
    """One server's side of the replication, as primary or as backup.

    Args: node: whose lock is held while its shard is used.
    """

    def __init__(self, node: ServerNode) -> None:
        self._node = node
        self._shard = node.shard
        self._membership = node.membership
        self._backups: dict[int, Connection] = {}

    # As the primary

    def on_view(self, view: View) -> None:
        """Wait for the backups that a view names, and for no others. The lock is held."""
        expected = set(self._shard.backups.clocks)
        for backup in expected - set(view.members):
            if backup in self._backups:
                self._backups.pop(backup).close()
            self._node.send(self._shard.remove_backup(backup))
        for backup in set(view.backups) - set(self._shard.backups.clocks):
            self._shard.await_backup(backup)

    def connect_backups(self) -> None:
        """As the primary, connect to every replica that has no connection yet."""
        if not self._membership.is_primary:
            return
        view = self._membership.view
        for backup in (*view.backups, *view.joining):
            if backup in self._backups:
                continue
            peer = self._membership.connect_to(backup, view.addresses.get(backup))
            if peer is not None:
                with self._node.lock:
                    self._backups[backup] = peer
                    threading.Thread(
                        target=self._receive_acks, args=(backup, peer), daemon=True
                    ).start()
                    self._node.send(self._shard.add_backup(backup, in_sync=backup in view.backups))

    def replicate(self, message: ReplicateUpdate | InstallSnapshot) -> None:
        """Send an update or a snapshot to a backup, under the epoch of this server's view.

        Without a connection the message is dropped: a snapshot follows the next connection.
        """
        connection = self._backups.get(message.backup)
        if connection is None:
            return
        epoch = self._membership.view.epoch
        if isinstance(message, InstallSnapshot):
            copy = message.content
            packed = pack_partition(copy.values, copy.state, copy.steps_by_worker)
            connection.post(Op.SNAPSHOT, packed, partition=copy.part, step=copy.clock, epoch=epoch)
            return
        update = message.update
        meta: dict[str, Any] = {
            "worker": update.worker,
            "step": update.step,
            "present": update.grad_mask.hex(),
            "settings": message.settings,
        }
        # Two frames, so that the gradient is sent from where it lies: nothing is packed around it.
        connection.post(Op.UPDATE_META, json.dumps(meta).encode(), partition=message.part)
        connection.post(
            Op.REPLICATE, update.gradient, partition=message.part, step=message.clock, epoch=epoch
        )

    def _receive_acks(self, backup: int, connection: Connection) -> None:
        try:
            while True:
                header, _ = connection.receive(lambda _: None)
                if header.op == Op.REFUSED:
                    log.info("this server was replaced: its backup %d follows another", backup)
                    continue
                # It has all updates of the partition before `header.step`; the flag is that of a
                # snapshot.
                with self._node.lock:
                    self._node.send(
                        self._shard.on_ack(
                            backup, header.partition, header.step, bool(header.flags)
                        )
                    )
        except WireError:
            connection.close()
            if self._backups.get(backup) is connection:
                del self._backups[backup]  # `connect_backups` connects again with each lease

    # As a backup

    def apply_from_primary(
        self,
        primary: int,
        peer: Connection,
        header: Header,
        payload: memoryview,
        meta: bytes,
    ) -> None:
        """Apply a message of the primary, and acknowledge it. The lock is held.

        Args:
            primary: FIRST_SERVER and the sender's number.
            meta: payload of the UPDATE_META frame before a REPLICATE.

        Raises:
            ProtocolViolation: the sender has been replaced, or the message makes no sense.
        """
        view = self._membership.view
        # A higher epoch than the one known here comes from a primary that has heard of its role
        # first, so it is trusted.
        if primary - FIRST_SERVER != view.primary and header.epoch <= view.epoch:
            raise ProtocolViolation(
                f"epoch {header.epoch} is over; in epoch {view.epoch} the primary is server "
                f"{view.primary}"
            )
        partition, clock = header.partition, header.step
        if header.op == Op.SNAPSHOT:
            copy = PartitionCopy(partition, clock, *unpack_part(payload))
            (answer,) = self._shard.install_snapshot(copy)
        elif header.op == Op.REPLICATE:
            fields = unpack(memoryview(meta))
            gradient = self._node.buffers.update(primary, header)
            grad_mask = bytes.fromhex(fields["present"])
            update = GradientUpdate(fields["worker"], fields["step"], gradient, grad_mask)
            message = ReplicateUpdate(0, partition, clock, update, fields["settings"])
            (answer,) = self._shard.apply_replicated(message)
        else:
            raise ProtocolViolation(f"message {header.op} from a server")
        assert isinstance(answer, Acknowledged)
        peer.post(
            Op.ACKNOWLEDGE,
            partition=answer.part,
            step=answer.clock,
            flags=int(header.op == Op.SNAPSHOT),
        )
