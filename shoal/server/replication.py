"""Replicas of a shard do what its primary does: it tells each backup of every update, and backups say what they have.

      primary ── FILL: a whole part, for one that has just come ──> backup
      primary ── ABOUT, APPLY: a gradient, and whose it was ──────> backup
      primary <────────────────────── ACKNOWLEDGE ─────────────── backup

Who the primary is, the arbiter says; a primary that was replaced and does not know it yet is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from shoal.server.arbiter import View
from shoal.server.frame import Header
from shoal.server.inbox import Inbox
from shoal.server.membership import Membership
from shoal.server.messages import FIRST_SERVER, Op, unpack, unpack_part
from shoal.server.peer import Peer
from shoal.server.said import Acknowledged, Applied, Filled, GradientUpdate, Out, Refused
from shoal.server.shard import Shard


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
        inbox: Inbox,
        lock: threading.Lock,
        send: Callable[[Iterable[Out]], None],
    ) -> None:
        self._shard, self._membership, self._inbox = shard, membership, inbox
        self._lock, self._send = lock, send

    # As the primary

    def follow(self, view: View) -> None:
        """Have the backups that a view names, and wait for no other. Holds the lock."""
        for backup in set(self._shard.backups.clocks) - set(view.members):
            if backup in self._membership.links:
                self._membership.drop(backup)
            self._send(self._shard.remove_backup(backup))
        for backup in set(view.backups) - set(self._shard.backups.clocks):
            self._shard.expect(backup)

    def link(self) -> None:
        """Have a link to every replica, if this server is the primary."""
        view = self._membership.view
        for backup in (*view.backups, *view.joining) if self._membership.is_primary else ():
            known = backup in self._membership.links
            peer = None if known else self._membership.reach(backup, view.addresses.get(backup))
            if peer is not None:
                with self._lock:
                    self._membership.link(backup, peer)
                    self._send(self._shard.add_backup(backup, in_sync=backup in view.backups))

    def acknowledged(self, backup: int, part: int, clock: int, filled: bool) -> None:
        """A backup has all updates of a part before `clock`."""
        with self._lock:
            self._send(self._shard.acknowledged(backup, part, clock, filled))

    # As a backup

    def repeat(self, primary: int, peer: Peer, header: Header, payload: memoryview, about: bytes) -> None:
        """Do what the primary did, and acknowledge it. Holds the lock. Raises Refused."""
        part, clock, view = header.part, header.step, self._membership.view
        if primary - FIRST_SERVER != view.primary and header.epoch <= view.epoch:
            raise Refused(f"epoch {header.epoch} is over; in epoch {view.epoch} the primary is server {view.primary}")
        if header.op == Op.FILL:
            values, state, done = unpack_part(payload)
            out = self._shard.fill(Filled(0, part, clock, values, state, done))
        elif header.op == Op.APPLY:
            found = unpack(memoryview(about))
            gradient = self._inbox.update(primary, header)
            present = bytes.fromhex(found["present"])
            update = GradientUpdate(found["worker"], found["step"], gradient, present)
            out = self._shard.repeat(Applied(0, part, clock, update, found["settings"]))
        else:
            raise Refused(f"message {header.op} from a server")
        for message in out:
            assert isinstance(message, Acknowledged)
            peer.post(Op.ACKNOWLEDGE, part=message.part, step=message.clock, flags=int(header.op == Op.FILL))
