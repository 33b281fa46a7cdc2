"""Start of a run's helper processes: one rank of each host starts that host's servers, and rank 0
the coordinator too.

rank 0   coordinator, servers of host 0
rank 1
rank 2                servers of host 1
rank 3

`report_servers` tells at the end of the run what the servers have done.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.comm.mesh import Mesh
from shoal.launch.environment import RankInfo
from shoal.launch.private_memory import read_secret
from shoal.parameter_server.cluster_config import ClusterConfig
from shoal.parameter_server.coordinator import admin_client
from shoal.parameter_server.coordinator.coordinator import Address
from shoal.parameter_server.launcher.server_pool import CoordinatorProcess, ServerPool
from shoal.parameter_server.transport.key import KEY_FILE, derived_key, new_key_file, read_key
from shoal.parameter_server.transport.settings import UNIX, Transport
from shoal.platform.files import make_private_directory
from shoal.platform.sockets import own_address_towards
from shoal.platform.tensors import MIB

CLOSE_LIMIT_S = 30.0
"""Time for the other workers to disconnect after this one has."""


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

    def start(
        self, make: Callable[[Transport, Path], ClusterConfig]
    ) -> tuple[ClusterConfig, Address]:
        """Start all processes. Collective: every rank must call it.

        Args:
            make: returns the job for a transport and the folder of the key.

        Returns:
            The job, and the address of its coordinator.
        """
        mesh = self.mesh
        transport, folder = self._share_key()
        starters = mesh.all_gather_str("x" if self.is_starter else "")
        starter_ranks = [rank for rank, is_starter in enumerate(starters) if is_starter]
        job = make(transport, folder)
        listen_host = self._listen_host()
        coordinator = None
        if mesh.rank == 0 and mesh.helper_spawner is not None:
            coordinator = CoordinatorProcess(mesh.helper_spawner, job, listen_host)
            if self._folder is not None:
                address_of_job = coordinator.address, job.transport
                admin_client.write_address_file(self._folder, *address_of_job)
                self._public = None if read_secret() is None else address_of_job
        host, port = json.loads(mesh.broadcast_str(json.dumps(coordinator and coordinator.address)))
        address = (host, port)
        if mesh.helper_spawner is not None:
            host_index = starter_ranks.index(mesh.rank)
            self.pool = ServerPool(
                mesh.helper_spawner,
                job,
                address,
                listen_host,
                coordinator,
                host_index,
                len(starter_ranks),
            )
        return job, address

    def announce(self, directory: Path) -> None:
        """Let `shoal servers` find the servers by the run directory."""
        if self._folder is not None:
            link = directory / admin_client.POINTER
            admin_client.symlink_to(link, self._folder)
            self._announced.append(link)
            if self._public is not None:
                admin_client.write_address_file(directory, *self._public)
                self._announced.append(directory / admin_client.ADDRESS_FILE)

    def close(self) -> None:
        """End the processes that this rank has started, and what starts them."""
        self.end_processes()
        if self.mesh.helper_spawner is not None:
            self.mesh.helper_spawner.close()

    def end_processes(self) -> None:
        """End the processes that this rank has started, once all their workers have left.

        Another launcher of the same rank may start others afterwards.
        """
        if self.pool is not None:
            self.pool.close(CLOSE_LIMIT_S)
            self.pool = None
        while self._announced:
            self._announced.pop().unlink(missing_ok=True)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _share_key(self) -> tuple[Transport, Path]:
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
            return Transport(read_key(folder / KEY_FILE), name), folder
        if self.is_starter and self._folder is None:
            self._folder = folder = make_private_directory("shoal-servers-")
        return Transport(derived_key(secret, name), name), folder

    def _listen_host(self) -> str:
        """Return where this host's servers listen for all ranks: an IP address, or UNIX."""
        place = self.mesh.place
        if place.master_address is None or not spans_machines(place):
            return UNIX
        return own_address_towards(place.master_address)


def spans_machines(place: RankInfo) -> bool:
    """Return whether ranks are on several machines, so that servers listen on the network."""
    return place.local_world < place.world


def report_servers(shards: Sequence[Mapping[str, Any]], together: bool) -> list[str]:
    """Return the lines of the report.

    Args:
        shards: the figures of each shard.
        together: all workers took each step together, so there is no staleness to report.
    """
    received_mib = sum(shard["received_bytes"] for shard in shards) / MIB
    sent_mib = sum(shard["sent_bytes"] for shard in shards) / MIB
    lines = [
        f"servers: {len(shards)} shards received {received_mib:,.1f} MiB and sent "
        f"{sent_mib:,.1f} MiB"
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
