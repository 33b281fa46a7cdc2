"""Replicas of a shard do what its primary does: it tells each backup of every update, and backups
say what they have.

      primary ── FILL: a whole part, for one that has just come ──> backup
      primary ── ABOUT, APPLY: a gradient, and whose it was ──────> backup
      primary <────────────────────── ACKNOWLEDGE ─────────────── backup

Who the primary is, the arbiter says; a primary that was replaced and does not know it yet is
refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from shoal.parameter_server.codec import FIRST_SERVER, Op, unpack, unpack_part
from shoal.parameter_server.coordinator.coordinator import View
from shoal.parameter_server.events import (
    Acknowledged,
    GradientUpdate,
    InstallSnapshot,
    Outgoing,
    ProtocolViolation,
    ReplicateUpdate,
)
from shoal.parameter_server.node.membership import Membership
from shoal.parameter_server.node.receive_buffers import ReceiveBuffers
from shoal.parameter_server.node.shard import Shard
from shoal.parameter_server.transport.connection import QueuedConnection
from shoal.parameter_server.transport.frame import Header


class Replication:
    """One server's share in it, be it the primary or a backup.

    Args:
        inbox: where updates have come in.
        lock: is held while the shard is used.
        send: says what the shard has to say.
    """

    def __init__(
        self,
        shard: Shard,
        membership: Membership,
        inbox: ReceiveBuffers,
        lock: threading.Lock,
        send: Callable[[Iterable[Outgoing]], None],
    ) -> None:
        self._shard, self._membership, self._inbox = shard, membership, inbox
        self._lock, self._send = lock, send

    # As the primary

    def on_view(self, view: View) -> None:
        """Have the backups that a view names, and wait for no other. Holds the lock."""
        for backup in set(self._shard.backups.clocks) - set(view.members):
            if backup in self._membership.links:
                self._membership.drop(backup)
            self._send(self._shard.remove_backup(backup))
        for backup in set(view.backups) - set(self._shard.backups.clocks):
            self._shard.await_backup(backup)

    def link(self) -> None:
        """Have a link to every replica, if this server is the primary."""
        view = self._membership.view
        for backup in (*view.backups, *view.joining) if self._membership.is_primary else ():
            known = backup in self._membership.links
            peer = (
                None if known else self._membership.connect_to(backup, view.addresses.get(backup))
            )
            if peer is not None:
                with self._lock:
                    self._membership.add_backup_link(backup, peer)
                    self._send(self._shard.add_backup(backup, in_sync=backup in view.backups))

    def acknowledged(self, backup: int, part: int, clock: int, filled: bool) -> None:
        """A backup has all updates of a part before `clock`."""
        with self._lock:
            self._send(self._shard.on_ack(backup, part, clock, filled))

    # As a backup

    def apply_from_primary(
        self,
        primary: int,
        peer: QueuedConnection,
        header: Header,
        payload: memoryview,
        about: bytes,
    ) -> None:
        """Do what the primary did, and acknowledge it. Holds the lock. Raises Refused."""
        part, clock, view = header.partition, header.step, self._membership.view
        if primary - FIRST_SERVER != view.primary and header.epoch <= view.epoch:
            raise ProtocolViolation(
                f"epoch {header.epoch} is over; in epoch {view.epoch} the primary is server "
                f"{view.primary}"
            )
        if header.op == Op.SNAPSHOT:
            values, state, done = unpack_part(payload)
            out = self._shard.install_snapshot(InstallSnapshot(0, part, clock, values, state, done))
        elif header.op == Op.REPLICATE:
            found = unpack(memoryview(about))
            gradient = self._inbox.update(primary, header)
            present = bytes.fromhex(found["present"])
            update = GradientUpdate(found["worker"], found["step"], gradient, present)
            out = self._shard.apply_replicated(
                ReplicateUpdate(0, part, clock, update, found["settings"])
            )
        else:
            raise ProtocolViolation(f"message {header.op} from a server")
        for message in out:
            assert isinstance(message, Acknowledged)
            peer.post(
                Op.ACKNOWLEDGE,
                partition=message.part,
                step=message.clock,
                flags=int(header.op == Op.SNAPSHOT),
            )
