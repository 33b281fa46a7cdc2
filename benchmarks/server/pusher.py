"""A worker of Shoal's parameter server, as training uses it: partitions of up to 4 MiB, a lease, a
coordinator.

    worker   copies a gradient to its send buffer ─── push ───> server   sums, steps, answers
             copies the values            <────────────────────

The optimizer replaces the values by the sum, so that a worker can check the values that it has.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from shoal.launch.helper_spawner import HelperSpawner
from shoal.parameter_server.cluster_config import ClusterConfig, ShardSettings
from shoal.parameter_server.events import StepRequest
from shoal.parameter_server.launcher import CoordinatorProcess, ServerPool
from shoal.parameter_server.optimizer_spec import recipe_of
from shoal.parameter_server.partitioning import ParamMeta, assign, partition, partition_bytes
from shoal.parameter_server.transport.key import new_key_file, read_key
from shoal.parameter_server.transport.settings import Transport
from shoal.parameter_server.worker.client import WorkerClient
from shoal.parameter_server.worker.flat_params import FlatParams
from shoal.parameter_server.worker.socket_network import SocketNetwork


class Replace(torch.optim.Optimizer):
    """New values are the gradient."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.copy_(parameter.grad)


class Job(NamedTuple):
    """One measurement.

    Args:
        folder: empty; it has a name of its own among all jobs.
        host: where servers listen: an address, or UNIX.
        encrypt: by TLS, where they listen at an address.
        floats: of the gradient.
    """

    folder: Path
    host: str
    encrypt: bool
    workers: int
    servers: int
    floats: int


class Pusher:
    """One worker; the first one starts the servers, and the others find them by a file."""

    def __init__(self, job: Job, index: int) -> None:
        self.job = job
        pattern = torch.arange(1000.0).repeat(-(-job.floats // 1000))[: job.floats]
        self.expected = pattern * (job.workers * (job.workers + 1) // 2)
        gradient = pattern.mul_(index + 1)
        shapes = {"weight": ParamMeta(job.floats, torch.float32, 0)}
        self.parts = partition(shapes, partition_bytes(shapes, job.servers))
        self.flat = FlatParams({"weight": nn.Parameter(torch.zeros(job.floats))}, self.parts)
        self.nursery: HelperSpawner | None = None
        told, loaded = job.folder / "told", job.folder / "loaded"
        if index == 0:
            told.with_suffix(".tmp").write_text(json.dumps(self._start_servers()))
            told.with_suffix(".tmp").rename(told)
        _await(told)
        address = tuple(json.loads(told.read_text()))
        network = SocketNetwork(index, address, self._transport(), self.flat, shares=False)
        self.client = WorkerClient(self.flat, network)
        self.pieces = gradient.split([part.length for part in self.parts])
        self.present = [b"\1" * len(part.segments) for part in self.parts]
        if index == 0:
            self.client.load([[{}] for _ in self.parts])
            loaded.touch()
        _await(loaded)
        self.client.mark_current()

    def round(self) -> None:
        """Push, and pull."""
        for number, piece in enumerate(self.pieces):
            self.client.push(number, piece, self.present[number])
        self.client.request_step(StepRequest([{"lr": 1.0}]))
        self.client.wait(range(len(self.parts)))

    def check(self) -> None:
        """Do a round, and compare what is here with the sum over the workers, bit by bit."""
        self.round()
        pieces = self.expected.split([part.length for part in self.parts])
        for held, expected in zip(self.flat.values, pieces, strict=True):
            assert torch.equal(held, expected), f"{held[:3]} in place of {expected[:3]}"

    def close(self) -> None:
        self.client.close()
        if self.nursery is not None:
            self.servers.close(30.0)
            self.nursery.close()

    def _transport(self) -> Transport:
        key = read_key(self.job.folder / "server.key")
        return Transport(key, self.job.folder.name, encrypt=self.job.encrypt)

    def _start_servers(self) -> tuple[str, int]:
        job, recipe = self.job, recipe_of(Replace([nn.Parameter(torch.zeros(1))]))
        owners = tuple(assign(self.parts, job.servers))
        new_key_file(job.folder)
        parts = tuple(self.parts)
        settings = ShardSettings(parts, recipe, job.workers, staleness=0, lease_s=10.0)
        cluster = ClusterConfig(self._transport(), job.folder, settings, owners, job.servers)
        self.nursery = HelperSpawner()
        coordinator = CoordinatorProcess(self.nursery, cluster, job.host)
        address = coordinator.address
        self.servers = ServerPool(self.nursery, cluster, address, job.host, coordinator)
        return address


def _await(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)
