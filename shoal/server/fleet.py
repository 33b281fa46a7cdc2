"""All servers of a job and their arbiter, as processes: started, replaced when they die, and ended.

nursery ─┬─ arbiter            a listening socket stays here, so that the next arbiter has the same port
         ├─ server 0: shard 0
         ├─ server 1: shard 1
         ├─ server 2: shard 0  (replica)
         └─ server 3: shard 1  (replica)
"""

from __future__ import annotations

import secrets
import shutil
import socket
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from shoal.comm.compress import Compression
from shoal.launch.nursery import Nursery
from shoal.server.arbiter import Address, View
from shoal.server.arbitrate import Court, arbitrate
from shoal.server.key import new_key_file, read_key
from shoal.server.layout import Part
from shoal.server.messages import FIRST_SERVER
from shoal.server.recipe import Recipe
from shoal.server.serve import Plan, serve
from shoal.server.views import Views

KEEPER = FIRST_SERVER - 1
"""The number under which the fleet follows the arbiter."""


class Fleet:
    """The processes of one job's servers on this machine.

    Attributes:
        job: its name, which nobody else's has.
        key_file: holds its key.
        arbiter: where the arbiter listens.
        servers: pid -> plan of each server that is alive.
    """

    def __init__(
        self,
        nursery: Nursery,
        shards: Sequence[tuple[Part, ...]],
        recipe: Recipe,
        *,
        replicas: int,
        workers: int,
        staleness: int | None,
        lease_s: float,
        compression: Compression | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self.nursery, self.replicas, self.host, self.lease_s = nursery, replicas, host, lease_s
        self.folder = Path(tempfile.mkdtemp(prefix="shoal-servers-"))
        self.job, self.key_file = secrets.token_hex(8), new_key_file(self.folder)
        self.key = read_key(self.key_file)
        self.listener = socket.create_server((host, 0), backlog=1024)
        self.arbiter: Address = self.listener.getsockname()[:2]
        self.court = Court(len(shards), workers, lease_s, self.job, self.key, self.folder / "views.json")
        self.compression = compression
        self.shards, self.recipe, self.workers, self.staleness = shards, recipe, workers, staleness
        self.servers: dict[int, Plan] = {}
        self.started, self.seen = 0, set[int]()
        self.lock = threading.Lock()
        self.closing = threading.Event()
        self.judge = nursery.start(arbitrate, self.court, listener=self.listener)
        for _ in range(replicas):
            for shard in range(len(shards)):
                self.start(shard)
        self.views = Views(KEEPER, self.arbiter, self.key, self.job, changed=self._complete)
        threading.Thread(target=self._watch, name="fleet", daemon=True).start()

    def start(self, shard: int) -> int:
        """One more server of a shard; its pid."""
        number, self.started = self.started, self.started + 1
        plan = Plan(
            server=number,
            shard=shard,
            parts=self.shards[shard],
            recipe=self.recipe,
            workers=self.workers,
            staleness=self.staleness,
            arbiter=self.arbiter,
            lease_s=self.lease_s,
            compression=self.compression,
            job=self.job,
            key=self.key,
        )
        with socket.create_server((self.host, 0), backlog=1024) as listener:
            pid = self.nursery.start(serve, plan, listener=listener)
        self.servers[pid] = plan
        return pid

    def close(self, limit_s: float) -> None:
        """End all, once every worker has said that it will not come back, or `limit_s` have passed."""
        with self.nursery.changed:
            self.nursery.changed.wait_for(lambda: self.judge not in self.nursery.alive, limit_s)
        self.closing.set()
        self.views.close()
        self.nursery.close()
        self.listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def pid_of(self, server: int) -> int:
        """The process of a server that is alive."""
        return next(pid for pid, plan in self.servers.items() if plan.server == server)

    def _watch(self) -> None:
        """Replace what has died."""
        while True:
            with self.nursery.changed:
                self.nursery.changed.wait_for(self._has_lost)
                dead = set(self.servers) - self.nursery.alive
                judge_died = self.judge not in self.nursery.alive
            if self.closing.is_set():
                return
            if judge_died:
                if self.nursery.codes.get(self.judge) == 0:
                    return  # every worker has gone
                self.judge = self.nursery.start(arbitrate, self.court, listener=self.listener)
            with self.lock:
                for pid in dead:
                    shard = self.servers.pop(pid).shard
                    if self.replicas > 1:
                        self.start(shard)

    def _has_lost(self) -> bool:
        return self.closing.is_set() or not {self.judge, *self.servers} <= self.nursery.alive

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
                if self.replicas > 1 and not view.lost:
                    self.start(view.shard)
