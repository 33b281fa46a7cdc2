"""Parts that change their shard: the old owner gives them, the new one takes them in.

      arbiter      placement: part 3 moves a -> b                        placement: part 3 is b's
      shard a      answers for it no more ── GIVE ─┐                     frees its memory, once every worker has used
                                                   │                     the values that it read here
      shard b                                      └─> fills its backups ── HELD ──> arbiter

Which part moves where, and in which version of the placement that began, is in `placement.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from shoal.parameter_server.codec import FIRST_SERVER, unpack_part
from shoal.parameter_server.coordinator.placement import Placement
from shoal.parameter_server.events import Outgoing, PartitionTransfer
from shoal.parameter_server.node.membership import Membership
from shoal.parameter_server.node.shard import Shard
from shoal.parameter_server.partitioning import Partition
from shoal.parameter_server.transport.frame import Header


class Migration:
    """What one server does about it.

    Args:
        number: of the server's shard.
        lock: is held while the shard is used.
        free: gives the memory of a part back.
        lease_s: what was given and has not come is given again after twice this time.
    """

    def __init__(
        self,
        number: int,
        shard: Shard,
        membership: Membership,
        lock: threading.Lock,
        free: Callable[[Partition], None],
        lease_s: float,
    ) -> None:
        self._number, self._shard, self._membership = number, shard, membership
        self._lock, self._free, self._lease_s = lock, free, lease_s
        self._news = threading.Condition(lock)
        self._placement: Placement | None = None
        self._given: dict[int, tuple[int, int, float]] = {}
        self._gone: dict[int, dict[int, int]] = {}

    def on_placement(self, placement: Placement) -> None:
        """Answer for what is this shard's now, and give what is to go."""
        with self._lock:
            self._placement, mine = placement, placement.owned_by(self._number)
            self._news.notify_all()
            away, coming = mine & set(placement.moving), placement.arriving_at(self._number)
            self._gone |= self._shard.set_ownership(mine, away, coming)
            self.discard()
        self.send_departing()

    def await_placement(self, version: int) -> None:
        """Another server may have heard before this one of what is to move."""
        with self._news:
            self._news.wait_for(
                lambda: self._placement is not None and self._placement.version >= version,
                self._lease_s,
            )

    def receive(self, giver: int, header: Header, payload: memoryview) -> list[Outgoing]:
        """As the primary, take what another server gives; whether that may, the arbiter
        decides. Holds the lock.
        """
        values, state, done = unpack_part(payload)
        if not self._membership.is_primary or header.partition not in self._shard.parts:
            return []
        given = PartitionTransfer(header.partition, header.step, values, state, done)
        return self._shard.import_partition(given, header.epoch, giver - FIRST_SERVER)

    def discard(self) -> None:
        """Free the memory of parts that have gone, once nobody can be reading it. Holds the
        lock.
        """
        for number, done in list(self._gone.items()):
            if number in self._shard.held:  # it has come back
                del self._gone[number]
            elif not self._membership.is_primary or self._shard.all_workers_read(done):
                del self._gone[number]
                self._free(self._shard.parts[number])

    def send_departing(self) -> None:
        """As the primary, send every part that is away to where it belongs, again if nothing
        came of it.
        """
        if self._placement is None or not self._membership.is_primary:
            return
        now, going = time.monotonic(), dict[int, list[int]]()
        for part, move in self._placement.moving.items() if self._shard.leaving else ():
            if (
                part in self._shard.leaving
                and (target := self._membership.primary_of(move.target)) is not None
            ):
                server, since, at = self._given.get(part, (-1, -1, 0.0))
                if (server, since) != (
                    target[0],
                    move.start_version,
                ) or now - at > 2 * self._lease_s:
                    self._given[part] = (target[0], move.start_version, now)
                    going.setdefault(move.target, []).append(part)
        for shard, parts in going.items():
            threading.Thread(target=self._give_all, args=(shard, parts), daemon=True).start()

    def _give_all(self, shard: int, parts: list[int]) -> None:
        target = self._membership.primary_of(shard)
        peer = None if target is None else self._membership.connect_to(*target)
        if peer is None:
            return
        for part in parts:
            with self._lock:
                placement, given = self._placement, self._shard.export_partition(part)
                if given is not None and placement is not None and part in placement.moving:
                    self._membership.give(given, placement.moving[part].start_version, peer)
        peer.close(flush=True)
