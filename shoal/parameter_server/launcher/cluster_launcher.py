"""Who starts which processes of a run's servers: one rank of each machine its own, rank 0 the
arbiter as well.

rank 0   arbiter, servers of machine 0, relay of machine 0 (where several machines have several workers)
rank 1
rank 2            servers of machine 1, relay of machine 1
rank 3
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from shoal.comm.mesh import Mesh
from shoal.parameter_server.coordinator import admin_client
from shoal.parameter_server.coordinator.coordinator import Address
from shoal.parameter_server.launcher.server_pool import (
    ClusterConfig,
    CoordinatorProcess,
    ServerPool,
)
from shoal.parameter_server.transport.key import new_key_file, read_key
from shoal.parameter_server.transport.settings import Transport
from shoal.parameter_server.worker.aggregator_server import UpstreamConfig

END_S = 30.0
"""How long other workers may take to hang up once this one has."""


class ClusterLauncher:
    """What this rank has started of a run's servers.

    Args:
        mesh: all ranks, each of which makes one of these and starts it.
        aggregates: sum on each machine before pushing, where that saves anything.
        shares: relays lend their memory to servers of the same machine.

    Attributes:
        fleets: of this rank: of servers, and of the relay.
        relayed: the workers of each machine talk to a relay.
    """

    def __init__(self, mesh: Mesh, aggregates: bool, shares: bool) -> None:
        self.mesh, self.aggregates, self.shares = mesh, aggregates, shares
        self.fleets: list[ServerPool] = []
        self.relayed = False
        self.folder: Path | None = None
        self.pointer: Path | None = None

    @property
    def is_starter(self) -> bool:
        """Whether this rank is the one of its machine that starts processes."""
        return self.mesh.helper_spawner is not None

    @property
    def worker(self) -> int:
        """This rank's number among those that push to the same servers, or to the same relay."""
        return self.mesh.place.local_rank if self.relayed else self.mesh.rank

    def start(
        self, make: Callable[[Transport, Path, int], ClusterConfig]
    ) -> tuple[ClusterConfig, Address]:
        """Start all. Collective.

        Args: make: transport, folder of the key, how many push -> the job.

        Returns: the job that this rank is a worker of, and its arbiter: that of its machine's
        relay, or of all servers."""
        mesh, told = self.mesh, ""
        if mesh.rank == 0:
            self.folder = Path(
                tempfile.mkdtemp(
                    prefix="shoal-servers-", dir=os.environ.get("SHOAL_SERVER_DIRECTORY")
                )
            )
            told = f"{secrets.token_hex(8)} {new_key_file(self.folder)}"
        name, file = mesh.broadcast_str(told).split(" ")
        machines = [
            rank for rank, starts in enumerate(mesh.all_gather_str("x" * self.is_starter)) if starts
        ]
        self.relayed = self.aggregates and 1 < len(machines) < mesh.size
        transport = Transport(read_key(Path(file)), name)
        job = make(transport, Path(file).parent, len(machines) if self.relayed else mesh.size)
        host = self._host()
        judge = (
            CoordinatorProcess(mesh.helper_spawner, job, host)
            if mesh.rank == 0 and mesh.helper_spawner is not None
            else None
        )
        if judge is not None and self.folder is not None:
            admin_client.write_address_file(self.folder, judge.address, name)
        arbiter = _address(mesh.broadcast_str(_format_address(judge)))
        if mesh.helper_spawner is not None:
            machine = machines.index(mesh.rank)
            self.fleets.append(
                ServerPool(mesh.helper_spawner, job, arbiter, host, judge, machine, len(machines))
            )
        return self._relay(job, arbiter, machines) if self.relayed else (job, arbiter)

    def announce(self, directory: Path) -> None:
        """Let a command find the servers by the run's directory."""
        if self.folder is not None:
            self.pointer = directory / admin_client.POINTER
            admin_client.symlink_to(self.pointer, self.folder)

    def close(self) -> None:
        """End what this rank has started, once its workers, and those of other machines, have
        hung up.
        """
        for fleet in reversed(self.fleets):  # a relay hangs up on the servers when its workers have
            fleet.close(END_S)
        if self.mesh.helper_spawner is not None:
            self.mesh.helper_spawner.close()
        if self.pointer is not None:
            self.pointer.unlink(missing_ok=True)
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _relay(
        self, job: ClusterConfig, arbiter: Address, machines: list[int]
    ) -> tuple[ClusterConfig, Address]:
        """Have a relay on this machine, which is then all that its workers know of servers.
        Collective.
        """
        mesh = self.mesh
        mine = max(number for number, rank in enumerate(machines) if rank <= mesh.rank)
        workers = (machines[mine + 1] if mine + 1 < len(machines) else mesh.size) - machines[mine]
        here = ClusterConfig(
            replace(job.transport, job=f"{job.transport.job}.{mine}"),
            job.folder,
            replace(job.settings, workers=workers),
            owners=(0,) * len(job.settings.parts),
            shards=1,
            behind=UpstreamConfig(
                arbiter, job.transport, mine, loads=mine == 0, shares=self.shares
            ),
        )
        judge = (
            None
            if mesh.helper_spawner is None
            else CoordinatorProcess(mesh.helper_spawner, here, "127.0.0.1")
        )
        address = _address(mesh.all_gather_str(_format_address(judge))[machines[mine]])
        if mesh.helper_spawner is not None:
            self.fleets.append(ServerPool(mesh.helper_spawner, here, address, "127.0.0.1", judge))
        return here, address

    def _host(self) -> str:
        """Where this machine's servers listen: at home, or where ranks of other machines can
        reach them.
        """
        place = self.mesh.place
        if place.local_world == place.world or place.master_address is None:
            return "127.0.0.1"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((place.master_address, 9))  # sends nothing; picks the way out
            return str(probe.getsockname()[0])


def _format_address(judge: CoordinatorProcess | None) -> str:
    return "" if judge is None else f"{judge.address[0]} {judge.address[1]}"


def _address(told: str) -> Address:
    host, port = told.split(" ")
    return host, int(port)
