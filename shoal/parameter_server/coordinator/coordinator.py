"""Membership of all shards and placement of all partitions, decided in one place, as a pure state
machine: no sockets, and callers pass the time.

      view of a shard    epoch 3   primary 0   backups 2   joining 5
                            │         │           │           └ gets snapshots; becomes a backup
                            │         │           │             when it is in sync
                            │         │           └ has every update that a worker was answered
                            │         └ answers workers, as long as it has a lease
                            └ grows with every change; a message of an older epoch is refused

A primary renews its lease with every heartbeat. If it has been silent for longer than a lease, it
has stopped answering by its own clock, and the first backup takes over under a new epoch. So two
servers never answer for a shard at once, whether the old primary died, was stopped or cannot be
reached. Without a backup, the coordinator waits for a silent primary. If the primary has
disconnected too and does not return in time, the shard is lost with its partitions.

Shards are added and removed during training. A new shard gets partitions once all its replicas are
there: else the loss of one server could lose partitions. A shard that is removed retires when its
last partition has migrated."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from shoal.parameter_server.partitioning import rebalance

Address = tuple[str, int]


@dataclass(frozen=True)
class View:
    """The servers of one shard.

    Attributes:
        epoch: 0 before the shard's first server.
        joining: servers that get snapshots.
        lost: no server holds the shard any more, and it owned partitions.
        retired: the shard has ended as it should, and owns nothing.
        addresses: server -> host and port where it listens.
    """

    shard: int
    epoch: int = 0
    primary: int | None = None
    backups: tuple[int, ...] = ()
    joining: tuple[int, ...] = ()
    lost: bool = False
    retired: bool = False
    addresses: Mapping[int, Address] = field(default_factory=dict)

    @property
    def members(self) -> tuple[int, ...]:
        """All servers of the shard: primary, backups, then joining."""
        return (*(() if self.primary is None else (self.primary,)), *self.backups, *self.joining)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "addresses": [[server, *address] for server, address in self.addresses.items()]
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> View:
        """Read the result of `to_json`, after a way through JSON."""
        addresses = {
            int(server): (str(host), int(port)) for server, host, port in fields["addresses"]
        }
        servers = {name: tuple(fields[name]) for name in ("backups", "joining")}
        return cls(**{**fields, **servers, "addresses": addresses})


class Move(NamedTuple):
    """Migration of one partition."""

    target: int  # the shard
    start_version: int  # the placement version in which the migration started


@dataclass(frozen=True)
class Placement:
    """The shard that owns each partition, and the partitions that migrate to another shard.

        shard a is owner       migrating a -> b             shard b is owner
        a answers              a has stopped, and sends     b answers; a frees its memory
                               b loads and replicates
                               workers hold their requests

    A cancelled migration must not be confused with a later one of the same partition. Each
    migration carries the placement version in which it started, and so does every transfer.

    Attributes:
        version: from 1.
        owners: the shard of each partition.
        moving: partition -> migration.
        leaving: shards that end as soon as they own nothing.
    """

    version: int
    owners: tuple[int, ...]
    moving: Mapping[int, Move] = field(default_factory=dict)
    leaving: tuple[int, ...] = ()

    def owned_by(self, shard: int) -> set[int]:
        """Return the partitions of a shard, with those that migrate away from it."""
        return {partition for partition, owner in enumerate(self.owners) if owner == shard}

    def arriving_at(self, shard: int) -> dict[int, int]:
        """Return the partitions that migrate to a shard -> the version in which each started."""
        return {
            partition: move.start_version
            for partition, move in self.moving.items()
            if move.target == shard
        }

    def route(self, partition: int) -> int | None:
        """Return the shard that answers for a partition; None while it migrates."""
        return None if partition in self.moving else self.owners[partition]

    def to_json(self) -> dict[str, Any]:
        moving = [[partition, *move] for partition, move in self.moving.items()]
        return {
            "version": self.version,
            "owners": self.owners,
            "moving": moving,
            "leaving": self.leaving,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Placement:
        """Read the result of `to_json`, after a way through JSON."""
        moving = {
            partition: Move(target, start_version)
            for partition, target, start_version in fields["moving"]
        }
        return cls(fields["version"], tuple(fields["owners"]), moving, tuple(fields["leaving"]))


class Coordinator:
    """Views of all shards, and the placement of partitions on them.

    Args:
        owners: the shard of each partition at the beginning.
        sizes: bytes of each partition.
        shards: number of shards at the beginning.
        lease_s: how long a lease lasts after a heartbeat.
        replicas: servers of each shard.
    """

    def __init__(
        self,
        owners: Sequence[int],
        sizes: Sequence[int],
        shards: int,
        lease_s: float,
        replicas: int = 1,
    ) -> None:
        self.sizes = sizes
        self.lease_s = lease_s
        self.replicas = replicas
        self.views = {shard: View(shard) for shard in range(shards)}
        self.placement = Placement(1, tuple(owners))
        self._last_heartbeat: dict[int, float] = {}
        self._disconnected: set[int] = set()

    # Servers that join, live and die

    def join(self, server: int, shard: int, address: Address, now: float) -> list[View]:
        """Add a server that has connected, for the first time or again.

        The first server of a shard becomes its primary; others join and hold nothing yet.

        Returns:
            Views that have changed, as all methods of this class that return views.
        """
        view = self.views[shard]
        self._last_heartbeat[server] = now
        self._disconnected.discard(server)
        if server in view.members:
            return []
        addresses = {**view.addresses, server: address}
        if view.lost or view.retired:
            return []
        if view.epoch == 0:
            changed = self._change_view(view, primary=server, addresses=addresses)
            return [self._rebalance_if_filled(changed)]
        return [self._change_view(view, joining=(*view.joining, server), addresses=addresses)]

    def heartbeat(self, server: int, now: float) -> bool:
        """Record a sign of life. Return whether the server is a member, so has a new lease."""
        if not any(server in view.members for view in self.views.values()):
            return False
        self._last_heartbeat[server] = now
        return True

    def disconnected(self, server: int) -> None:
        """Record that a server's connection has ended; it may come back."""
        self._disconnected.add(server)

    def in_sync(self, shard: int, backup: int, epoch: int) -> list[View]:
        """Make a joining server a backup: the primary of `epoch` has sent it all snapshots."""
        view = self.views[shard]
        if backup not in view.joining or epoch > view.epoch:
            return []
        joining = tuple(server for server in view.joining if server != backup)
        backups = (*view.backups, backup)
        return [
            self._rebalance_if_filled(self._change_view(view, joining=joining, backups=backups))
        ]

    def tick(self, now: float) -> list[View]:
        """Replace primaries and drop replicas whose lease has expired; retire empty shards."""
        # A primary counts its lease from the moment when it sent its heartbeat, and this count
        # begins when the heartbeat arrives: so the primary's lease always ends first.
        silent = {
            server for server, heard in self._last_heartbeat.items() if now - heard > self.lease_s
        }
        changed = [self._remove_silent(view, silent) for view in list(self.views.values())]
        return [*(view for view in changed if view is not None), *self._retire_empty()]

    # Shards that are added and removed

    def add(self) -> View:
        """Add a shard. The caller starts its servers; it gets partitions when all are there."""
        view = View(max(self.views) + 1)
        self.views[view.shard] = view
        return view

    def remove(self, shard: int) -> str:
        """Migrate a shard's partitions to the other shards, and retire it.

        Returns:
            The reason why that is impossible; empty if it has started.
        """
        view = self.views.get(shard)
        if view is None or view.retired:
            return (
                f"there is no shard {shard}; there are {', '.join(map(str, self._active_shards()))}"
            )
        if shard == 0:
            return "shard 0 stays: workers agree there when to stop. Remove another one"
        if shard in self.placement.leaving:
            return f"shard {shard} is leaving already"
        self._replace_placement(leaving=(*self.placement.leaving, shard))
        self._rebalance()
        return ""

    def transfer_done(
        self, server: int, partition: int, start_version: int, source: int
    ) -> list[View]:
        """Finish a migration: a server and its backups have the partition.

        Args:
            server: the primary of the target shard.
            start_version: the placement version in which the migration started.
            source: the server that sent the partition.
        """
        move = self.placement.moving.get(partition)
        if (
            move is None
            or move.start_version != start_version
            or self.views[move.target].primary != server
        ):
            return []
        # The sender may have been replaced, and so may have sent old values. The new primary of
        # its shard sends the partition again.
        if self.views[self.placement.owners[partition]].primary != source:
            return []
        owners = list(self.placement.owners)
        owners[partition] = move.target
        moving = {
            number: other for number, other in self.placement.moving.items() if number != partition
        }
        self._replace_placement(owners=tuple(owners), moving=moving)
        return self._retire_empty()

    def is_filling(self, shard: int) -> bool:
        """Return whether a shard is new, and waits for its replicas before it gets partitions."""
        view = self.views[shard]
        return (
            view.epoch == 0 or 1 + len(view.backups) < self.replicas
        ) and not self.placement.owned_by(shard)

    def _rebalance_if_filled(self, view: View) -> View:
        """Give partitions to a shard that has waited for the replica which it has just got."""
        if not self.is_filling(view.shard) and not self.placement.owned_by(view.shard):
            self._rebalance()
        return view

    def _retire_empty(self) -> list[View]:
        """Retire the shards that are leaving and have no partition left."""
        targets = (move.target for move in self.placement.moving.values())
        busy = {*self.placement.owners, *targets}
        empty = [shard for shard in self.placement.leaving if shard not in busy]
        if empty:
            leaving = tuple(shard for shard in self.placement.leaving if shard not in empty)
            self._replace_placement(leaving=leaving)
        return [
            self._change_view(self.views[shard], primary=None, backups=(), joining=(), retired=True)
            for shard in empty
        ]

    def _active_shards(self) -> list[int]:
        """Return the shards that own partitions, or may be given some."""
        leaving = self.placement.leaving
        return [
            shard
            for shard, view in self.views.items()
            if not (view.retired or view.lost or shard in leaving)
        ]

    def _rebalance(self) -> None:
        """Start the migrations that balance the shards; cancel those that no longer help."""
        active = [shard for shard in self._active_shards() if not self.is_filling(shard)]
        moving = dict(self.placement.moving)
        # A migration that has started counts as done, so that it is not started in vain.
        destinations = [
            moving[partition].target if partition in moving else owner
            for partition, owner in enumerate(self.placement.owners)
        ]
        changes = rebalance(self.sizes, destinations, active) if active else {}
        for partition, target in changes.items():
            moving.pop(partition, None)
            if self.placement.owners[partition] != target:
                moving[partition] = Move(target, self.placement.version + 1)
        self._replace_placement(moving=moving)

    def _replace_placement(self, **changes: Any) -> None:
        self.placement = replace(self.placement, version=self.placement.version + 1, **changes)

    # State on disk: what the next coordinator must know

    def to_json(self) -> str:
        """Return all state as JSON text."""
        views = [view.to_json() for view in self.views.values()]
        return json.dumps({"views": views, "placement": self.placement.to_json()})

    def from_json(self, text: str, now: float) -> None:
        """Load the result of `to_json`. Every server has the time of a lease to be heard."""
        state = json.loads(text)
        for view in map(View.from_json, state["views"]):
            self.views[view.shard] = view
            self._last_heartbeat |= dict.fromkeys(view.members, now)
        self.placement = Placement.from_json(state["placement"])

    # Views

    def _remove_silent(self, view: View, silent: set[int]) -> View | None:
        """Remove silent servers from a view. Return the new view; None if nothing changes."""
        backups = tuple(server for server in view.backups if server not in silent)
        joining = tuple(server for server in view.joining if server not in silent)
        if view.primary not in silent or view.lost:
            if len(backups + joining) == len(view.backups + view.joining):
                return None
            return self._change_view(view, backups=backups, joining=joining)
        if backups:
            return self._change_view(view, primary=backups[0], backups=backups[1:], joining=joining)
        # Nobody can take over. A primary that is still connected may only be slow: wait for it.
        if view.primary not in self._disconnected:
            return None
        if view.shard == 0 or self.placement.owned_by(view.shard):
            return self._change_view(view, primary=None, backups=(), joining=(), lost=True)
        changed = self._change_view(view, primary=None, backups=(), joining=(), retired=True)
        self._rebalance()  # partitions that were migrating to it go to another shard
        return changed

    def _change_view(self, view: View, **changes: Any) -> View:
        """Replace a view under the next epoch; forget the servers that it no longer names."""
        changed = replace(view, epoch=view.epoch + 1, **changes)
        members = changed.members
        addresses = {
            server: address for server, address in changed.addresses.items() if server in members
        }
        changed = replace(changed, addresses=addresses)
        self.views[view.shard] = changed
        for server in set(view.members) - set(members):
            self._last_heartbeat.pop(server, None)
        return changed
