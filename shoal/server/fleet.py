"""A machine's servers, and on one machine the arbiter, as processes: started, replaced when they die, and ended.

      machine of rank 0                        another machine
      nursery ─┬─ arbiter                      nursery ─┬─ server of shard 1
               ├─ server of shard 0                     └─ server of shard 0  (replica)
               └─ server of shard 1  (replica)

The arbiter's listening socket stays here, so that the next arbiter has the same port.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.comm.compress import Compression
from shoal.launch.nursery import Nursery
from shoal.server.arbiter import Address, View
from shoal.server.arbitrate import Court, arbitrate
from shoal.server.key import read_key
from shoal.server.layout import Part
from shoal.server.messages import FIRST_SERVER
from shoal.server.recipe import Recipe
from shoal.server.serve import Plan, serve
from shoal.server.views import Views


@dataclass(frozen=True)
class Job:
    """What all processes of a job's servers know.

    Args:
        name: which nobody else's has.
        key_file: holds the key.
        shards: the parts of each.
        replicas: how many servers hold each shard.
        workers: how many push.
        staleness: as for `Shard`.
        lease_s: how long a server may be silent before another takes over.
    """

    name: str
    key_file: Path
    shards: tuple[tuple[Part, ...], ...]
    recipe: Recipe
    replicas: int
    workers: int
    staleness: int | None
    lease_s: float
    compression: Compression | None = None


def place_servers(shards: int, replicas: int, machines: int) -> list[list[int]]:
    """The shards that each machine begins with: one after the other, replicas of a shard on different machines."""
    found: list[list[int]] = [[] for _ in range(machines)]
    for replica in range(replicas):
        for shard in range(shards):
            found[(shard + replica) % machines].append(shard)
    return found


class Judge:
    """The arbiter's process, started again when it dies."""

    def __init__(self, nursery: Nursery, job: Job, host: str) -> None:
        self.nursery = nursery
        self.listener = socket.create_server((host, 0), backlog=1024)
        self.address: Address = self.listener.getsockname()[:2]
        file = job.key_file.with_name("views.json")
        self.court = Court(len(job.shards), job.workers, job.lease_s, job.name, read_key(job.key_file), file)
        self.pid = 0
        self.start()

    def start(self) -> None:
        self.pid = self.nursery.start(arbitrate, self.court, listener=self.listener)

    @property
    def is_done(self) -> bool:
        """Every worker has said that it will not come back."""
        return self.nursery.codes.get(self.pid) == 0


class Fleet:
    """The servers of one machine.

    Attributes:
        servers: pid -> plan of each that is alive.
    """

    def __init__(
        self, nursery: Nursery, job: Job, mine: Sequence[int], arbiter: Address, host: str, judge: Judge | None = None
    ) -> None:
        self.nursery, self.job, self.arbiter, self.host, self.judge = nursery, job, arbiter, host, judge
        self.key = read_key(job.key_file)
        self.servers: dict[int, Plan] = {}
        self.seen: set[int] = set()
        self.lock = threading.Lock()
        self.closing = threading.Event()
        for shard in mine:
            self.start(shard)
        keeper = FIRST_SERVER - 1 - secrets.randbelow(2**20)  # one of each machine
        self.views = Views(keeper, arbiter, self.key, job.name, changed=self._complete)
        threading.Thread(target=self._watch, name="fleet", daemon=True).start()

    def start(self, shard: int) -> int:
        """One more server of a shard; its pid."""
        number = secrets.randbelow(2**30)  # machines need not agree on who is next
        plan = Plan(
            server=number,
            shard=shard,
            parts=self.job.shards[shard],
            recipe=self.job.recipe,
            workers=self.job.workers,
            staleness=self.job.staleness,
            arbiter=self.arbiter,
            lease_s=self.job.lease_s,
            compression=self.job.compression,
            job=self.job.name,
            key=self.key,
        )
        with socket.create_server((self.host, 0), backlog=1024) as listener:
            pid = self.nursery.start(serve, plan, listener=listener)
        self.servers[pid] = plan
        return pid

    def close(self, limit_s: float) -> None:
        """End all, once every worker has said that it will not come back, or `limit_s` have passed."""
        if self.judge is not None:
            with self.nursery.changed:
                self.nursery.changed.wait_for(lambda: self._judge_ended(), limit_s)
            self.judge.listener.close()
        self.closing.set()
        self.views.close()
        self.nursery.close()

    def pid_of(self, server: int) -> int:
        """The process of a server that is alive."""
        return next(pid for pid, plan in self.servers.items() if plan.server == server)

    def _judge_ended(self) -> bool:
        return self.judge is not None and self.judge.pid not in self.nursery.alive

    def _watch(self) -> None:
        """Replace what has died."""
        while True:
            with self.nursery.changed:
                self.nursery.changed.wait_for(self._has_lost)
                dead = set(self.servers) - self.nursery.alive
            if self.closing.is_set() or (self.judge is not None and self.judge.is_done):
                return
            if self.judge is not None and self._judge_ended():
                self.judge.start()
            with self.lock:
                for pid in dead:
                    shard = self.servers.pop(pid).shard
                    if self.job.replicas > 1:
                        self.start(shard)

    def _has_lost(self) -> bool:
        return self.closing.is_set() or self._judge_ended() or not set(self.servers) <= self.nursery.alive

    def _complete(self, view: View) -> None:
        """Start a server in place of one that the arbiter has given up, though its process is alive."""
        with self.lock:
            given_up = [
                pid
                for pid, plan in self.servers.items()
                if plan.shard == view.shard and plan.server in self.seen and plan.server not in view.members
            ]
            self.seen |= set(view.members)
            for pid in given_up:
                del self.servers[pid]
                if self.job.replicas > 1 and not view.lost:
                    self.start(view.shard)
