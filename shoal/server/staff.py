"""Who starts which processes of a run's servers: one rank of each machine its own, rank 0 the arbiter as well.

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
from shoal.server import control
from shoal.server.arbiter import Address
from shoal.server.fleet import Fleet, Job, Judge
from shoal.server.key import new_key_file, read_key
from shoal.server.relay import Behind
from shoal.server.transport_settings import Transport

END_S = 30.0
"""How long other workers may take to hang up once this one has."""


class Staff:
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
        self.fleets: list[Fleet] = []
        self.relayed = False
        self.folder: Path | None = None
        self.pointer: Path | None = None

    @property
    def starts(self) -> bool:
        """Whether this rank is the one of its machine that starts processes."""
        return self.mesh.nursery is not None

    @property
    def worker(self) -> int:
        """This rank's number among those that push to the same servers, or to the same relay."""
        return self.mesh.place.local_rank if self.relayed else self.mesh.rank

    def start(self, make: Callable[[Transport, Path, int], Job]) -> tuple[Job, Address]:
        """Start all. Collective.

        Args: make: transport, folder of the key, how many push -> the job.

        Returns: the job that this rank is a worker of, and its arbiter: that of its machine's relay, or of all servers.
        """
        mesh, told = self.mesh, ""
        if mesh.rank == 0:
            self.folder = Path(tempfile.mkdtemp(prefix="shoal-servers-", dir=os.environ.get("SHOAL_SERVER_DIRECTORY")))
            told = f"{secrets.token_hex(8)} {new_key_file(self.folder)}"
        name, file = mesh.broadcast_text(told).split(" ")
        machines = [rank for rank, starts in enumerate(mesh.gather_text("x" * self.starts)) if starts]
        self.relayed = self.aggregates and 1 < len(machines) < mesh.size
        transport = Transport(read_key(Path(file)), name)
        job = make(transport, Path(file).parent, len(machines) if self.relayed else mesh.size)
        host = self._host()
        judge = Judge(mesh.nursery, job, host) if mesh.rank == 0 and mesh.nursery is not None else None
        if judge is not None and self.folder is not None:
            control.announce(self.folder, judge.address, name)
        arbiter = _address(mesh.broadcast_text(_told(judge)))
        if mesh.nursery is not None:
            machine = machines.index(mesh.rank)
            self.fleets.append(Fleet(mesh.nursery, job, arbiter, host, judge, machine, len(machines)))
        return self._relay(job, arbiter, machines) if self.relayed else (job, arbiter)

    def announce(self, directory: Path) -> None:
        """Let a command find the servers by the run's directory."""
        if self.folder is not None:
            self.pointer = directory / control.POINTER
            control.point(self.pointer, self.folder)

    def close(self) -> None:
        """End what this rank has started, once its workers, and those of other machines, have hung up."""
        for fleet in reversed(self.fleets):  # a relay hangs up on the servers when its workers have
            fleet.close(END_S)
        if self.mesh.nursery is not None:
            self.mesh.nursery.close()
        if self.pointer is not None:
            self.pointer.unlink(missing_ok=True)
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _relay(self, job: Job, arbiter: Address, machines: list[int]) -> tuple[Job, Address]:
        """Have a relay on this machine, which is then all that its workers know of servers. Collective."""
        mesh = self.mesh
        mine = max(number for number, rank in enumerate(machines) if rank <= mesh.rank)
        workers = (machines[mine + 1] if mine + 1 < len(machines) else mesh.size) - machines[mine]
        here = Job(
            replace(job.transport, job=f"{job.transport.job}.{mine}"),
            job.folder,
            replace(job.settings, workers=workers),
            owners=(0,) * len(job.settings.parts),
            shards=1,
            behind=Behind(arbiter, job.transport, mine, loads=mine == 0, shares=self.shares),
        )
        judge = None if mesh.nursery is None else Judge(mesh.nursery, here, "127.0.0.1")
        address = _address(mesh.gather_text(_told(judge))[machines[mine]])
        if mesh.nursery is not None:
            self.fleets.append(Fleet(mesh.nursery, here, address, "127.0.0.1", judge))
        return here, address

    def _host(self) -> str:
        """Where this machine's servers listen: at home, or where ranks of other machines can reach them."""
        place = self.mesh.place
        if place.local_world == place.world or place.master_address is None:
            return "127.0.0.1"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((place.master_address, 9))  # sends nothing; picks the way out
            return str(probe.getsockname()[0])


def _told(judge: Judge | None) -> str:
    return "" if judge is None else f"{judge.address[0]} {judge.address[1]}"


def _address(told: str) -> Address:
    host, port = told.split(" ")
    return host, int(port)
