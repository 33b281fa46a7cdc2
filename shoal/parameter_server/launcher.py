"""Helper processes of a run: one rank of each host starts that host's servers, and rank 0 the
coordinator too. They are replaced when they die, and ended with the run.

      host of rank 0                               another host, of ranks or of servers alone
      spawner ─┬─ coordinator                      spawner ─┬─ server of shard 1
               ├─ server of shard 0                         └─ server of shard 0  (replica)
               └─ server of shard 1  (replica)

The coordinator's views say which shards there are, and each host keeps its part of their servers
alive. The coordinator's listening socket belongs to the process of the pool, so that a coordinator
that is started again has the same port.

`report_servers` tells at the end of the run what the servers have done.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.comm.mesh import Mesh
from shoal.launch.environment import RankInfo
from shoal.launch.failure import end_of_process
from shoal.launch.helper_spawner import HelperSpawner
from shoal.launch.output import print_note
from shoal.launch.private_memory import read_secret
from shoal.parameter_server.cluster_config import ClusterConfig
from shoal.parameter_server.codec import FIRST_HOST_ID, Op
from shoal.parameter_server.coordinator import admin_client
from shoal.parameter_server.coordinator.coordinator import Address, View
from shoal.parameter_server.coordinator.coordinator_server import serve_coordinator
from shoal.parameter_server.coordinator.watch import ClusterWatcher
from shoal.parameter_server.job_store import JobStore
from shoal.parameter_server.node.node_server import ServerConfig, serve
from shoal.parameter_server.transport.connection import Header
from shoal.parameter_server.transport.key import KEY_FILE, derived_key, new_key_file, read_key
from shoal.parameter_server.transport.settings import UNIX, Transport, address_of, listen
from shoal.platform.files import make_private_directory
from shoal.platform.sockets import own_address_towards
from shoal.platform.tensors import MIB

CLOSE_LIMIT_S = 30.0
"""Time for the other workers to disconnect after this one has."""
_PROBES_PER_LEASE = 4
_MAX_SILENT_PROBES = 8


def replicas_on_host(shard: int, replicas: int, machine: int | None, machines: int) -> int:
    """Return how many servers of a shard a host has; replicas go to one host after the other."""
    return sum((shard + replica) % machines == machine for replica in range(replicas))


class CoordinatorProcess:
    """The coordinator's process, which may be started again after its death.

    Args:
        host: the IP address where it listens, or UNIX.

    Attributes:
        pid: of the newest process.
        silent_probes: probes since its last answer.
    """

    def __init__(self, spawner: HelperSpawner, job: ClusterConfig, host: str) -> None:
        self.spawner = spawner
        self.listener = listen(host)
        self.address: Address = address_of(self.listener)
        self.job = job
        self.pid = 0
        self.silent_probes = 0
        self.start()

    def start(self) -> None:
        """Start a process on the same listening socket."""
        self.pid = self.spawner.start(serve_coordinator, self.job, listener=self.listener)


class ServerPool:
    """The servers of one host. A thread compares what the views say with what is alive.

    Args:
        coordinator_address: where the job's coordinator listens.
        host: the IP address where the servers listen, or UNIX.
        coordinator: its process, on the host that has it.
        machine: index of this host among those with servers; None where it has none.
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
        machine: int | None = 0,
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
        self._views_changed = False
        self._closing = False
        self._answers = 0
        self.watcher = ClusterWatcher(
            FIRST_HOST_ID + secrets.randbelow(2**20),
            coordinator_address,
            job.transport,
            changed=lambda _: self._wake(),
            answered=self._on_answer,
        )
        self.watcher.begin()
        threading.Thread(target=self._run, name="server pool", daemon=True).start()

    def start(self, shard: int) -> int:
        """Start one more server of a shard; return its pid."""
        number = secrets.randbelow(2**30)  # random, so hosts need not agree on the next number
        transport = self.job.transport.for_parts(self.job.settings.parts)
        config = ServerConfig(number, shard, self.coordinator_address, transport, self.job.settings)
        with listen(self.host) as listener:
            pid = self.spawner.start(serve, config, listener=listener)
        self.servers[pid] = config
        return pid

    def close(self, limit_s: float | None) -> None:
        """Stop to replace processes, once every worker has left or `limit_s` have passed.

        The processes themselves end with the spawner.
        """
        self.watcher.over.wait(limit_s)
        self._closing = True
        self.watcher.close()
        self._wake()
        if self.coordinator is not None:
            self.coordinator.listener.close()

    def _wake(self) -> None:
        with self.spawner.changed:
            self._views_changed = True
            self.spawner.changed.notify_all()

    def _on_answer(self, _: Header) -> None:
        self._answers += 1

    # The thread

    def _run(self) -> None:
        """Start what is missing and replace what has died, before the end of the job."""
        probe_s = self.job.settings.lease_s / _PROBES_PER_LEASE
        while True:
            with self.spawner.changed:
                is_due = self.spawner.changed.wait_for(self._has_work, probe_s)
                self._views_changed = False
                dead = set(self.servers) - self.spawner.alive
            if self.coordinator and self.spawner.codes.get(self.coordinator.pid) == 0:
                self.watcher.over.set()  # it has ended because every worker has left
            if self._closing or self.watcher.over.is_set():
                return
            if self.coordinator is not None:
                self._keep_alive(self.coordinator, is_due)
            for pid in dead:
                self._tell_loss(pid, self.servers.pop(pid))
            for view in self.watcher.known():
                self._start_missing(view)

    def _has_work(self) -> bool:
        coordinator = self.coordinator
        has_ended = coordinator is not None and coordinator.pid not in self.spawner.alive
        return self._views_changed or has_ended or not set(self.servers) <= self.spawner.alive

    def _keep_alive(self, coordinator: CoordinatorProcess, is_due: bool) -> None:
        """Start a coordinator that has died again; kill one that is silent, such as a stopped one.

        It is silent after two leases of probes without an answer. Probes are counted instead of
        seconds: after a host has slept, the clock has moved on, but the coordinator has had no
        time to answer.
        """
        pid = coordinator.pid
        if pid not in self.spawner.alive:
            end = end_of_process(self.spawner.codes[pid])
            print_note(f"the servers' coordinator (process {pid}) {end}; another is started")
            coordinator.start()
            coordinator.silent_probes = 0
        elif self._answers:
            self._answers = coordinator.silent_probes = 0
        elif not is_due:
            coordinator.silent_probes += 1
            if coordinator.silent_probes > _MAX_SILENT_PROBES:
                os.kill(pid, signal.SIGKILL)
        if not is_due:
            self.watcher.post(Op.HEARTBEAT)

    def _tell_loss(self, pid: int, config: ServerConfig) -> None:
        """Print a note of a server that has died; one that leaves its shard ends without a code."""
        if not (code := self.spawner.codes[pid]):
            return
        server = f"the server of shard {config.shard} (process {pid}) {end_of_process(code)}"
        primaries = {view.primary for view in self.watcher.known()}
        other = "its backup takes over" if config.server in primaries else "its primary goes on"
        if self.job.replicas > 1:
            print_note(f"{server}; {other}, and another is started")
        else:
            print_note(f"{server}; no other holds what it held")

    def _start_missing(self, view: View) -> None:
        """Start the servers of a shard that this host should have and has not."""
        local = {
            pid: config.server for pid, config in self.servers.items() if config.shard == view.shard
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
            if pid in self.spawner.alive and not view.retired:
                silent = f"the server of shard {view.shard} (process {pid}) does not answer"
                print_note(f"{silent}; another has taken over, or takes its place")
        # With one replica, a new server cannot have what the old one held.
        is_unreplaceable = view.epoch and self.job.replicas == 1
        if view.lost or view.retired or is_unreplaceable:
            return
        expected = replicas_on_host(view.shard, self.job.replicas, self.machine, self.machines)
        for _ in range(expected - len(local) + len(removed)):
            self.start(view.shard)


class ClusterLauncher:
    """Helper processes of a run that this rank has started.

    Args:
        mesh: of all ranks. Each rank makes one launcher and starts it.

    Attributes:
        pool: servers that this rank has started; None before, and on ranks that start none.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.pool: ServerPool | None = None
        self._folder: Path | None = None
        # The coordinator and its job, where other hosts find the servers by them.
        self._public: tuple[Address, Transport] | None = None
        self._announced: list[Path] = []

    @property
    def is_starter(self) -> bool:
        """Return whether this rank starts the processes of its host."""
        return self.mesh.helper_spawner is not None

    def start(self, job: ClusterConfig) -> Address:
        """Start all processes of a job, and return the address of its coordinator. Collective.

        Hosts of servers alone are told what to start.

        Args: job: with the transport and the folder of `share_key`.

        Raises: StrategyRefused: hosts of servers alone cannot import the optimizer.
        """
        mesh = self.mesh
        server_hosts = mesh.place.server_hosts
        told = job.to_json() if server_hosts else ""
        starters = mesh.all_gather_str("x" if self.is_starter else "")
        starter_ranks = [rank for rank, is_starter in enumerate(starters) if is_starter]
        listen_host = self._listen_host()
        coordinator = None
        if mesh.rank == 0 and mesh.helper_spawner is not None:
            coordinator = CoordinatorProcess(mesh.helper_spawner, job, listen_host)
            if self._folder is not None:
                address_of_job = coordinator.address, job.transport
                admin_client.write_address_file(self._folder, *address_of_job)
                self._public = None if read_secret() is None else address_of_job
        host, port = mesh.broadcast_json(coordinator and coordinator.address)
        address = (host, port)
        if server_hosts and mesh.rank == 0:
            JobStore().publish(json.dumps([address, told]))
        if mesh.helper_spawner is not None and (coordinator is not None or not server_hosts):
            self.pool = ServerPool(
                mesh.helper_spawner,
                job,
                address,
                listen_host,
                coordinator,
                None if server_hosts else starter_ranks.index(mesh.rank),
                server_hosts or len(starter_ranks),
            )
        return address

    def announce(self, directory: Path) -> None:
        """Let `shoal servers` find the servers by the run directory."""
        if self._folder is not None:
            link = directory / admin_client.POINTER
            if link.is_symlink():
                link.unlink()
            link.symlink_to(self._folder, target_is_directory=True)
            self._announced.append(link)
            if self._public is not None:
                admin_client.write_address_file(directory, *self._public)
                self._announced.append(directory / admin_client.ADDRESS_FILE)

    def close(self, limit_s: float | None = CLOSE_LIMIT_S) -> None:
        """End the processes that this rank has started, and what starts them.

        Args: limit_s: to wait until all their workers have left; None for no limit.
        """
        if self.pool is not None:
            self.pool.close(limit_s)
            self.pool = None
        while self._announced:
            self._announced.pop().unlink(missing_ok=True)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self.mesh.helper_spawner is not None:
            self.mesh.helper_spawner.close()

    def share_key(self, encrypt: bool) -> tuple[Transport, Path]:
        """Make the job's name and key on rank 0, for all ranks. Collective.

        The key is in a file that all ranks read; where the launcher has given them a secret, each
        derives it, and hosts need no directory that they share.

        Returns:
            The job's transport, and a folder of this host for its servers: on rank 0 of the key.
        """
        secret = read_secret()
        name = secrets.token_hex(8)
        if self.mesh.rank == 0:
            parent = os.environ.get("SHOAL_SERVER_DIRECTORY")
            self._folder = make_private_directory("shoal-servers-", parent)
            new_key_file(self._folder, None if secret is None else derived_key(secret, name))
        name, place = self.mesh.broadcast_str(f"{name} {self._folder}").split(" ", 1)
        folder = Path(place)
        if secret is None:
            return Transport(read_key(folder / KEY_FILE), name, encrypt=encrypt), folder
        if self.is_starter and self._folder is None:
            self._folder = folder = make_private_directory("shoal-servers-")
        return Transport(derived_key(secret, name), name, encrypt=encrypt), folder

    def _listen_host(self) -> str:
        """Return where this host's servers listen for all ranks: an IP address, or UNIX."""
        place = self.mesh.place
        if place.master_address is None or not spans_machines(place):
            return UNIX
        return own_address_towards(place.master_address)


def spans_machines(place: RankInfo) -> bool:
    """Return whether ranks and servers are on several machines, and so meet on the network."""
    return place.local_world < place.world or place.server_hosts > 0


def report_servers(shards: Sequence[Mapping[str, Any]], together: bool) -> list[str]:
    """Return the lines of the report.

    Args:
        shards: the figures of each shard.
        together: all workers took each step together, so there is no staleness to report.
    """
    received_mib = sum(shard["received_bytes"] for shard in shards) / MIB
    sent_mib = sum(shard["sent_bytes"] for shard in shards) / MIB
    lines = [
        f"servers: {len(shards)} shard{'s' if len(shards) > 1 else ''} received "
        f"{received_mib:,.1f} MiB and sent {sent_mib:,.1f} MiB by sockets; on one machine, "
        "workers and servers read each other's memory"
    ]
    refused = sum(shard["refused"] for shard in shards)
    if refused:
        lines.append(f"servers refused {refused} connections or messages: their warnings say why")
    reads: Counter[int] = Counter()  # staleness -> number of reads
    for shard in shards:
        reads.update({int(staleness): count for staleness, count in shard["staleness"].items()})
    if not together:
        shares = (
            f"{staleness}: {100 * reads[staleness] / reads.total():.1f} %"
            for staleness in sorted(reads)
        )
        lines.append(
            f"steps that a worker was ahead of the slowest when it read: {', '.join(shares)}"
        )
    return lines
