"""A machine's servers, and on one machine the arbiter, as processes: started, replaced when they
die, and ended.

      machine of rank 0                        another machine
      nursery ─┬─ arbiter                      nursery ─┬─ server of shard 1
               ├─ server of shard 0                     └─ server of shard 0  (replica)
               └─ server of shard 1  (replica)

The arbiter's views say which shards there are; each machine keeps its share of their servers alive.
The arbiter's listening socket stays here, so that the next arbiter has the same port."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import threading
from dataclasses import dataclass
from pathlib import Path

from shoal.launch.helper_spawner import HelperSpawner
from shoal.parameter_server.codec import FIRST_HOST_ID, Op
from shoal.parameter_server.coordinator.coordinator import Address, View
from shoal.parameter_server.coordinator.coordinator_server import (
    CoordinatorConfig,
    serve_coordinator,
)
from shoal.parameter_server.coordinator.watch import ClusterWatcher
from shoal.parameter_server.node.node_server import ServerConfig, serve
from shoal.parameter_server.shard_settings import ShardSettings
from shoal.parameter_server.transport.frame import Header
from shoal.parameter_server.transport.settings import Transport
from shoal.parameter_server.worker.aggregator_server import UpstreamConfig, relay


@dataclass(frozen=True)
class ClusterConfig:
    """What all processes of a job's servers know.

    Args:
        transport: how they reach each other; no other job has its name.
        folder: where the arbiter keeps its file.
        settings: of all shards.
        owners: the shard of each part at the beginning.
        shards: how many there are at the beginning.
        replicas: how many servers hold each shard.
        behind: of a relay, the servers that it sums for.
    """

    transport: Transport
    folder: Path
    settings: ShardSettings
    owners: tuple[int, ...]
    shards: int
    replicas: int = 1
    behind: UpstreamConfig | None = None


def replicas_on_host(shard: int, replicas: int, machine: int, machines: int) -> int:
    """How many servers of a shard a machine has: one after the other, replicas on different
    machines.
    """
    return sum((shard + replica) % machines == machine for replica in range(replicas))


class CoordinatorProcess:
    """The arbiter's process, started again when it dies."""

    def __init__(self, nursery: HelperSpawner, job: ClusterConfig, host: str) -> None:
        self.nursery = nursery
        self.listener = socket.create_server((host, 0), backlog=1024)
        self.address: Address = self.listener.getsockname()[:2]
        file = job.folder / f"views-{job.transport.job}.json"
        self.court = CoordinatorConfig(
            job.transport, file, job.settings, job.owners, job.shards, job.replicas
        )
        self.pid = 0
        self.start()

    def start(self) -> None:
        self.pid = self.nursery.start(serve_coordinator, self.court, listener=self.listener)

    @property
    def is_done(self) -> bool:
        """Every worker has said that it will not come back."""
        return self.nursery.codes.get(self.pid) == 0


class ServerPool:
    """The servers of one machine.

    Args: machine, machines: this one's number, and how many have servers.

    Attributes:
        servers: pid -> plan of each that is alive.
    """

    def __init__(
        self,
        nursery: HelperSpawner,
        job: ClusterConfig,
        arbiter: Address,
        host: str,
        judge: CoordinatorProcess | None = None,
        machine: int = 0,
        machines: int = 1,
    ) -> None:
        self.nursery, self.job, self.arbiter, self.host, self.judge = (
            nursery,
            job,
            arbiter,
            host,
            judge,
        )
        self.machine, self.machines = machine, machines
        self.servers: dict[int, ServerConfig] = {}
        self.seen: set[int] = set()
        self.lock = threading.Lock()
        self.closing = threading.Event()
        keeper = FIRST_HOST_ID + secrets.randbelow(2**20)
        self.answers = 0
        self.views = ClusterWatcher(
            keeper, arbiter, job.transport, changed=self._start_missing, answered=self._count
        )
        self.views.begin()
        threading.Thread(target=self._watch, name="fleet", daemon=True).start()
        if judge is not None:
            threading.Thread(
                target=self._watch_coordinator, args=(judge,), name="arbiter", daemon=True
            ).start()

    def start(self, shard: int) -> int:
        """One more server of a shard; its pid."""
        number = secrets.randbelow(2**30)  # machines need not agree on who is next
        transport = self.job.transport.for_parts(self.job.settings.parts)
        plan = ServerConfig(number, shard, self.arbiter, transport, self.job.settings)
        with socket.create_server((self.host, 0), backlog=1024) as listener:
            if self.job.behind is None:
                pid = self.nursery.start(serve, plan, listener=listener)
            else:
                pid = self.nursery.start(relay, plan, self.job.behind, listener=listener)
        self.servers[pid] = plan
        return pid

    def close(self, limit_s: float) -> None:
        """Keep nothing alive any more, once every worker has said that it will not come back or
        `limit_s` have passed.

        The processes end with the nursery.
        """
        self.views.over.wait(limit_s)
        self.closing.set()
        self.views.close()
        with self.nursery.changed:
            self.nursery.changed.notify_all()
        if self.judge is not None:
            self.judge.listener.close()

    def pid_of(self, server: int) -> int:
        """The process of a server that is alive."""
        return next(pid for pid, plan in self.servers.items() if plan.server == server)

    def _coordinator_exited(self) -> bool:
        return self.judge is not None and self.judge.pid not in self.nursery.alive

    def _watch(self) -> None:
        """Replace what has died."""
        while True:
            with self.nursery.changed:
                self.nursery.changed.wait_for(self._is_over)
                dead = set(self.servers) - self.nursery.alive
            if self.judge is not None and self.judge.is_done:
                self.views.over.set()
            if self.closing.is_set() or self.views.over.is_set():
                return
            if self.judge is not None and self._coordinator_exited():
                self.judge.start()
            with self.lock:
                for pid in dead:
                    self.servers.pop(pid, None)
            for view in self.views.known():
                self._start_missing(view)

    def _count(self, _: Header) -> None:
        self.answers += 1

    def _watch_coordinator(self, judge: CoordinatorProcess) -> None:
        """End an arbiter that is alive and silent for two leases, as one that was stopped is:
        the next goes on.
        """
        pid, heard, silent = 0, 0, 0
        while not self.closing.wait(
            self.job.settings.lease_s / 4
        ):  # counted, for a machine that slept wakes up all of them
            is_silent = judge.pid == pid and self.answers == heard
            pid, heard, silent = judge.pid, self.answers, silent + 1 if is_silent else 0
            self.views.post(Op.HEARTBEAT)
            if silent > 8 and pid in self.nursery.alive:
                os.kill(pid, signal.SIGKILL)

    def _is_over(self) -> bool:
        return (
            self.closing.is_set()
            or self._coordinator_exited()
            or not set(self.servers) <= self.nursery.alive
        )

    def _start_missing(self, view: View) -> None:
        """Have this machine's share of a shard's servers, without those that the arbiter has
        given up.
        """
        with self.lock:
            mine = {
                pid: plan.server for pid, plan in self.servers.items() if plan.shard == view.shard
            }
            given_up = [
                pid
                for pid, server in mine.items()
                if server in self.seen and server not in view.members
            ]
            self.seen |= set(view.members)
            for pid in given_up:
                del self.servers[pid]
            if (
                view.lost
                or view.retired
                or self.views.over.is_set()
                or self.closing.is_set()
                or (view.epoch and self.job.replicas == 1)
            ):
                return  # what a server alone has held, no other one can have
            wanted = replicas_on_host(view.shard, self.job.replicas, self.machine, self.machines)
            for _ in range(wanted - len(mine) + len(given_up)):
                self.start(view.shard)
