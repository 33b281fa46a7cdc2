"""Who owns a shard, decided in one place; no sockets, and time is what it is told.

      view of a shard    epoch 3   primary 0   backups 2   joining 5
                            │         │           │           └ being filled; becomes a backup when it is in sync
                            │         │           └ holds every update that a worker was answered
                            │         └ answers workers, as long as it holds a lease
                            └ grows with every change; a message of an older epoch is refused

A primary renews its lease with every beat. When it has been silent for longer than a lease lasts,
it has stopped answering by its own clock, and the first backup takes over under a new epoch. So two
never answer at once, whether the old one died, was stopped, or cannot be reached. Where there is no
backup, a silent primary is waited for; one that has hung up, and does not come back in time, is
lost, and its parts with it.

Shards come and go while training goes on. A new one is given parts once all its replicas are there,
or the loss of one server could be the loss of parts; one that is to go ends when the last of its
parts is elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from shoal.parameter_server.coordinator.placement import Move, Placement
from shoal.parameter_server.partitioning import rebalance

Address = tuple[str, int]


@dataclass(frozen=True)
class View:
    """Who holds a shard. `lost`: nobody does any more. `retired`: nobody has to."""

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
        """Everyone who holds it or is about to."""
        return (*(() if self.primary is None else (self.primary,)), *self.backups, *self.joining)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "addresses": [[server, *address] for server, address in self.addresses.items()]
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> View:
        addresses = {
            int(server): (str(host), int(port)) for server, host, port in found["addresses"]
        }
        lists = {name: tuple(found[name]) for name in ("backups", "joining")}
        return cls(**{**found, **lists, "addresses": addresses})


class Coordinator:
    """The views of all shards, and which parts are theirs.

    Args:
        owners: the shard of each part at the beginning.
        sizes: bytes of each part.
        shards: how many there are at the beginning.
        lease_s: how long a beat is worth.
        replicas: how many servers hold each shard.
    """

    def __init__(
        self,
        owners: Sequence[int],
        sizes: Sequence[int],
        shards: int,
        lease_s: float,
        replicas: int = 1,
    ) -> None:
        self.sizes, self.lease_s, self.replicas = sizes, lease_s, replicas
        self.views = {shard: View(shard) for shard in range(shards)}
        self.placement = Placement(1, tuple(owners))
        self.speeds: dict[int, float] = {}
        self.heard: dict[int, float] = {}
        self.hung_up: set[int] = set()

    def join(self, server: int, shard: int, address: Address, now: float) -> list[View]:
        """A server is there, with nothing, or once more. The first one of a shard is its
        primary.
        """
        view = self.views[shard]
        self.heard[server] = now
        self.hung_up.discard(server)
        if server in view.members:
            return []
        addresses = {**view.addresses, server: address}
        if view.lost or view.retired:
            return []
        if view.epoch == 0:
            return [self._with_parts(self._change(view, primary=server, addresses=addresses))]
        return [self._change(view, joining=(*view.joining, server), addresses=addresses)]

    def heartbeat(self, server: int, now: float) -> bool:
        """A server is alive; whether it still holds anything, and so has a lease again."""
        if not any(server in view.members for view in self.views.values()):
            return False
        self.heard[server] = now
        return True

    def disconnected(self, server: int) -> None:
        """A server's connection has ended; it may come back."""
        self.hung_up.add(server)

    def in_sync(self, shard: int, backup: int, epoch: int) -> list[View]:
        """The primary of that epoch has filled a joining server."""
        view = self.views[shard]
        if backup not in view.joining or epoch > view.epoch:
            return []
        joining = tuple(server for server in view.joining if server != backup)
        return [
            self._with_parts(self._change(view, joining=joining, backups=(*view.backups, backup)))
        ]

    def tick(self, now: float) -> list[View]:
        """What the silence of some means."""
        # A primary's lease began when it sent its beat, which was before it was heard.
        silent = {server for server, heard in self.heard.items() if now - heard > self.lease_s}
        changed = [self._without(view, silent) for view in list(self.views.values())]
        return [*(view for view in changed if view is not None), *self._retire()]

    # Shards that come and go

    def add(self) -> View:
        """One shard more. Somebody has to start its servers; it is given parts when all of them
        are there.
        """
        view = View(max(self.views) + 1)
        self.views[view.shard] = view
        return view

    def remove(self, shard: int) -> str:
        """Have a shard give its parts to the others and end. Why that cannot be, or nothing."""
        view = self.views.get(shard)
        if view is None or view.retired:
            return (
                f"there is no shard {shard}; there are {', '.join(map(str, self._active_shards()))}"
            )
        if shard == 0:
            return "shard 0 stays: workers agree there when to stop. Remove another one"
        if shard in self.placement.leaving:
            return f"shard {shard} is leaving already"
        self._replace(leaving=(*self.placement.leaving, shard))
        self._rebalance()
        return ""

    def set_bandwidths(self, speeds: Mapping[int, float]) -> None:
        """How fast each shard takes parts in, in bytes per second: parts are placed by it from
        now on.
        """
        self.speeds |= speeds
        self._rebalance()

    def transfer_done(self, server: int, part: int, since: int, giver: int) -> list[View]:
        """A server says that it, and its backups, hold a part that `giver` has given for the
        move since `since`.
        """
        move = self.placement.moving.get(part)
        if move is None or move.start_version != since or self.views[move.target].primary != server:
            return []
        if (
            self.views[self.placement.owners[part]].primary != giver
        ):  # one that was replaced; the next one gives again
            return []
        owners = list(self.placement.owners)
        owners[part] = move.target
        moving = {number: kept for number, kept in self.placement.moving.items() if number != part}
        self._replace(owners=tuple(owners), moving=moving)
        return self._retire()

    def is_filling(self, shard: int) -> bool:
        """A shard that is new, and is given no parts before it has all its replicas."""
        view = self.views[shard]
        return (
            view.epoch == 0 or 1 + len(view.backups) < self.replicas
        ) and not self.placement.owned_by(shard)

    def _with_parts(self, view: View) -> View:
        """One more server holds a shard; if it has waited for that, it is given parts."""
        if not self.is_filling(view.shard) and not self.placement.owned_by(view.shard):
            self._rebalance()
        return view

    def _retire(self) -> list[View]:
        """End the shards that are to go and have nothing left."""
        busy = {*self.placement.owners, *(move.target for move in self.placement.moving.values())}
        done = [shard for shard in self.placement.leaving if shard not in busy]
        if done:
            self._replace(
                leaving=tuple(shard for shard in self.placement.leaving if shard not in done)
            )
        return [
            self._change(self.views[shard], primary=None, backups=(), joining=(), retired=True)
            for shard in done
        ]

    def _active_shards(self) -> list[int]:
        leaving = self.placement.leaving
        return [
            shard
            for shard, view in self.views.items()
            if not (view.retired or view.lost or shard in leaving)
        ]

    def _rebalance(self) -> None:
        """Begin the moves that make shards even; call off those that are for one that leaves."""
        here = [shard for shard in self._active_shards() if not self.is_filling(shard)]
        known = [self.speeds[shard] for shard in here if shard in self.speeds]
        usual = sum(known) / len(known) if known else 1.0
        speeds = {shard: self.speeds.get(shard, usual) for shard in here}
        moving = dict(self.placement.moving)
        bound = [
            moving[part].target if part in moving else owner
            for part, owner in enumerate(self.placement.owners)
        ]
        for part, target in rebalance(self.sizes, bound, speeds).items() if speeds else ():
            moving.pop(part, None)
            if self.placement.owners[part] != target:
                moving[part] = Move(target, self.placement.version + 1)
        self._replace(moving=moving)

    def _replace(self, **what: Any) -> None:
        self.placement = replace(self.placement, version=self.placement.version + 1, **what)

    # What the next arbiter must know

    def to_json(self) -> str:
        """All of it."""
        views = [view.to_json() for view in self.views.values()]
        return json.dumps(
            {
                "views": views,
                "placement": self.placement.to_json(),
                "speeds": [*self.speeds.items()],
            }
        )

    def from_json(self, text: str, now: float) -> None:
        """The inverse; everyone has a lease's time to be heard of."""
        found = json.loads(text)
        for view in map(View.from_json, found["views"]):
            self.views[view.shard] = view
            self.heard |= dict.fromkeys(view.members, now)
        self.placement = Placement.from_json(found["placement"])
        self.speeds = dict(found["speeds"])

    def _without(self, view: View, silent: set[int]) -> View | None:
        backups = tuple(server for server in view.backups if server not in silent)
        joining = tuple(server for server in view.joining if server not in silent)
        if view.primary not in silent or view.lost:
            return None if len(backups + joining) == len(view.backups + view.joining) else self._change(
                view, backups=backups, joining=joining
            )  # fmt: skip
        if backups:
            return self._change(view, primary=backups[0], backups=backups[1:], joining=joining)
        if view.primary not in self.hung_up:
            return None
        if view.shard == 0 or self.placement.owned_by(view.shard):
            return self._change(view, primary=None, backups=(), joining=(), lost=True)
        changed = self._change(view, primary=None, backups=(), joining=(), retired=True)
        self._rebalance()  # what was on its way there goes elsewhere
        return changed

    def _change(self, view: View, **what: Any) -> View:
        changed = replace(view, epoch=view.epoch + 1, **what)
        members = changed.members
        addresses = {
            server: address for server, address in changed.addresses.items() if server in members
        }
        changed = replace(changed, addresses=addresses)
        self.views[view.shard] = changed
        for server in set(view.members) - set(members):
            self.heard.pop(server, None)
        return changed
