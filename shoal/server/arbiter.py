"""Who owns a shard, decided in one place; no sockets, and time is what it is told.

      view of a shard    epoch 3   primary 0   backups 2   joining 5
                            │         │           │           └ being filled; becomes a backup when it is in sync
                            │         │           └ holds every update that a worker was answered
                            │         └ answers workers, as long as it holds a lease
                            └ grows with every change; a message of an older epoch is refused

A primary renews its lease with every beat. When it has been silent for longer than a lease lasts, it has stopped
answering by its own clock, and the first backup takes over under a new epoch. So two never answer at once, whether the
old one died, was stopped, or cannot be reached. Where there is no backup, a silent primary is waited for; one that has
hung up, and does not come back in time, is lost, and its parts with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

Address = tuple[str, int]


@dataclass(frozen=True)
class View:
    """Who holds a shard. `lost`: nobody does any more."""

    shard: int
    epoch: int = 0
    primary: int | None = None
    backups: tuple[int, ...] = ()
    joining: tuple[int, ...] = ()
    lost: bool = False
    addresses: Mapping[int, Address] = field(default_factory=dict)

    @property
    def members(self) -> tuple[int, ...]:
        """Everyone who holds it or is about to."""
        return (*(() if self.primary is None else (self.primary,)), *self.backups, *self.joining)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"addresses": [[server, *address] for server, address in self.addresses.items()]}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> View:
        addresses = {int(server): (str(host), int(port)) for server, host, port in found["addresses"]}
        lists = {name: tuple(found[name]) for name in ("backups", "joining")}
        return cls(**{**found, **lists, "addresses": addresses})


class Arbiter:
    """The views of all shards.

    Args:
        shards: how many there are.
        lease_s: how long a beat is worth.
    """

    def __init__(self, shards: int, lease_s: float) -> None:
        self.lease_s = lease_s
        self.views = {shard: View(shard) for shard in range(shards)}
        self.heard: dict[int, float] = {}
        self.hung_up: set[int] = set()

    def join(self, server: int, shard: int, address: Address, now: float) -> list[View]:
        """A server is there, with nothing, or once more. The first one of a shard is its primary."""
        view = self.views[shard]
        self.heard[server] = now
        self.hung_up.discard(server)
        if server in view.members:
            return []
        addresses = {**view.addresses, server: address}
        if view.epoch == 0:
            return [self._change(view, primary=server, addresses=addresses)]
        if view.lost:
            return []
        return [self._change(view, joining=(*view.joining, server), addresses=addresses)]

    def beat(self, server: int, now: float) -> bool:
        """A server is alive; whether it still holds anything, and so has a lease again."""
        if not any(server in view.members for view in self.views.values()):
            return False
        self.heard[server] = now
        return True

    def hang_up(self, server: int) -> None:
        """A server's connection has ended; it may come back."""
        self.hung_up.add(server)

    def in_sync(self, shard: int, backup: int, epoch: int) -> list[View]:
        """The primary of that epoch has filled a joining server."""
        view = self.views[shard]
        if backup not in view.joining or epoch > view.epoch:
            return []
        joining = tuple(server for server in view.joining if server != backup)
        return [self._change(view, joining=joining, backups=(*view.backups, backup))]

    def tick(self, now: float) -> list[View]:
        """What the silence of some means."""
        # A primary's lease began when it sent its beat, which was before it was heard.
        silent = {server for server, heard in self.heard.items() if now - heard > self.lease_s}
        return [changed for view in self.views.values() if (changed := self._without(view, silent)) is not None]

    def dump(self) -> str:
        """Everything that the next arbiter must know."""
        return json.dumps([view.to_json() for view in self.views.values()])

    def restore(self, text: str, now: float) -> None:
        """The inverse; everyone has a lease's time to be heard of."""
        for found in json.loads(text):
            view = View.from_json(found)
            self.views[view.shard] = view
            self.heard |= dict.fromkeys(view.members, now)

    def _without(self, view: View, silent: set[int]) -> View | None:
        backups = tuple(server for server in view.backups if server not in silent)
        joining = tuple(server for server in view.joining if server not in silent)
        if view.primary not in silent or view.lost:
            return None if len(backups + joining) == len(view.backups + view.joining) else self._change(
                view, backups=backups, joining=joining
            )  # fmt: skip
        if backups:
            return self._change(view, primary=backups[0], backups=backups[1:], joining=joining)
        if view.primary in self.hung_up:
            return self._change(view, primary=None, backups=(), joining=(), lost=True)
        return None

    def _change(self, view: View, **what: Any) -> View:
        changed = replace(view, epoch=view.epoch + 1, **what)
        members = changed.members
        addresses = {server: address for server, address in changed.addresses.items() if server in members}
        changed = replace(changed, addresses=addresses)
        self.views[view.shard] = changed
        for server in set(view.members) - set(members):
            self.heard.pop(server, None)
        return changed
