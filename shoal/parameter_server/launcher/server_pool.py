"""Server processes of one host, and on one host the coordinator's: started, replaced when they die,
and ended.

      host of rank 0                               another host
      spawner ─┬─ coordinator                      spawner ─┬─ server of shard 1
               ├─ server of shard 0                         └─ server of shard 0  (replica)
               └─ server of shard 1  (replica)

The coordinator's views say which shards there are, and each host keeps its part of their servers
alive. The coordinator's listening socket belongs to the process of the pool, so that a coordinator
that is started again has the same port."""

from __future__ import annotations

import os
import secrets
import signal
import threading

from shoal.launch.helper_spawner import HelperSpawner
from shoal.parameter_server.cluster_config import ClusterConfig
from shoal.parameter_server.codec import FIRST_HOST_ID, Op
from shoal.parameter_server.coordinator.coordinator import Address, View
from shoal.parameter_server.coordinator.coordinator_server import serve_coordinator
from shoal.parameter_server.coordinator.watch import ClusterWatcher
from shoal.parameter_server.node.node_server import ServerConfig, serve
from shoal.parameter_server.transport.connection import Header
from shoal.parameter_server.transport.settings import address_of, listen

_PROBES_PER_LEASE = 4
_MAX_SILENT_PROBES = 8


def replicas_on_host(shard: int, replicas: int, machine: int, machines: int) -> int:
    """Return how many servers of a shard a host has; replicas go to one host after the other."""
    return sum((shard + replica) % machines == machine for replica in range(replicas))


class CoordinatorProcess:
    """The coordinator's process, which may be started again after its death.

    Args:
        host: the IP address where it listens, or UNIX.

    Attributes:
        pid: of the newest process.
    """

    def __init__(self, spawner: HelperSpawner, job: ClusterConfig, host: str) -> None:
        self.spawner = spawner
        self.listener = listen(host)
        self.address: Address = address_of(self.listener)
        self.job = job
        self.pid = 0
        self.start()

    def start(self) -> None:
        """Start a process on the same listening socket."""
        self.pid = self.spawner.start(serve_coordinator, self.job, listener=self.listener)

    @property
    def is_done(self) -> bool:
        """Return whether the process has ended because every worker has left."""
        return self.spawner.codes.get(self.pid) == 0


class ServerPool:
    """The servers of one host.

    Args:
        coordinator_address: where the job's coordinator listens.
        host: the IP address where the servers listen, or UNIX.
        coordinator: its process, on the host that has it.
        machine: index of this host.
        machines: number of hosts with servers.

    Attributes:
        servers: pid -> settings of each server that is alive.
        watcher: subscription to the coordinator, whose views say which servers to start.
    """

    def __init__(
        self,
        spawner: HelperSpawner,
        job: ClusterConfig,
        coordinator_address: Address,
        host: str,
        coordinator: CoordinatorProcess | None = None,
        machine: int = 0,
        machines: int = 1,
    ) -> None:
        self.spawner = spawner
        self.job = job
        self.coordinator_address = coordinator_address
        self.host = host
        self.coordinator = coordinator
        self.machine = machine
        self.machines = machines
        self.servers: dict[int, ServerConfig] = {}
        self._seen: set[int] = set()  # servers that have been members of a view
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._answers = 0
        self.watcher = ClusterWatcher(
            FIRST_HOST_ID + secrets.randbelow(2**20),
            coordinator_address,
            job.transport,
            changed=self._start_missing,
            answered=self._on_answer,
        )
        self.watcher.begin()
        threading.Thread(target=self._run, name="fleet", daemon=True).start()
        if coordinator is not None:
            probing = threading.Thread(
                target=self._probe_coordinator, args=(coordinator,), name="arbiter", daemon=True
            )
            probing.start()

    def start(self, shard: int) -> int:
        """Start one more server of a shard; return its pid."""
        number = secrets.randbelow(2**30)  # random, so hosts need not agree on the next number
        transport = self.job.transport.for_parts(self.job.settings.parts)
        config = ServerConfig(number, shard, self.coordinator_address, transport, self.job.settings)
        with listen(self.host) as listener:
            pid = self.spawner.start(serve, config, listener=listener)
        self.servers[pid] = config
        return pid

    def close(self, limit_s: float) -> None:
        """Stop to replace processes, once every worker has left or `limit_s` have passed.

        The processes themselves end with the spawner.
        """
        self.watcher.over.wait(limit_s)
        self._closing.set()
        self.watcher.close()
        with self.spawner.changed:
            self.spawner.changed.notify_all()
        if self.coordinator is not None:
            self.coordinator.listener.close()

    # Threads

    def _run(self) -> None:
        """Replace processes that have died, before the end of the job."""
        while True:
            with self.spawner.changed:
                self.spawner.changed.wait_for(self._has_work)
                dead = set(self.servers) - self.spawner.alive
            if self.coordinator is not None and self.coordinator.is_done:
                self.watcher.over.set()
            if self._is_over():
                return
            if self.coordinator is not None and self._coordinator_exited():
                self.coordinator.start()
            with self._lock:
                for pid in dead:
                    self.servers.pop(pid, None)
            for view in self.watcher.known():
                self._start_missing(view)

    def _has_work(self) -> bool:
        return (
            self._closing.is_set()
            or self._coordinator_exited()
            or not set(self.servers) <= self.spawner.alive
        )

    def _is_over(self) -> bool:
        return self._closing.is_set() or self.watcher.over.is_set()

    def _coordinator_exited(self) -> bool:
        return self.coordinator is not None and self.coordinator.pid not in self.spawner.alive

    def _on_answer(self, _: Header) -> None:
        self._answers += 1

    def _probe_coordinator(self, coordinator: CoordinatorProcess) -> None:
        """Kill a coordinator that is alive but silent for two leases, such as a stopped one.

        `_run` then starts it again. Probes are counted instead of seconds: after a host has slept,
        the clock has moved on, but the coordinator has had no time to answer.
        """
        pid = 0
        answers = 0
        silent_probes = 0
        while not self._closing.wait(self.job.settings.lease_s / _PROBES_PER_LEASE):
            is_silent = coordinator.pid == pid and self._answers == answers
            pid = coordinator.pid
            answers = self._answers
            silent_probes = silent_probes + 1 if is_silent else 0
            self.watcher.post(Op.HEARTBEAT)
            if silent_probes > _MAX_SILENT_PROBES and pid in self.spawner.alive:
                os.kill(pid, signal.SIGKILL)

    def _start_missing(self, view: View) -> None:
        """Start the servers of a shard that this host should have and has not."""
        with self._lock:
            local = {
                pid: config.server
                for pid, config in self.servers.items()
                if config.shard == view.shard
            }
            # The coordinator has replaced these: they end by themselves.
            removed = [
                pid
                for pid, server in local.items()
                if server in self._seen and server not in view.members
            ]
            self._seen |= set(view.members)
            for pid in removed:
                del self.servers[pid]
            # With one replica, a new server cannot have what the old one held.
            is_unreplaceable = view.epoch and self.job.replicas == 1
            if view.lost or view.retired or is_unreplaceable or self._is_over():
                return
            expected = replicas_on_host(view.shard, self.job.replicas, self.machine, self.machines)
            for _ in range(expected - len(local) + len(removed)):
                self.start(view.shard)
