"""Shoal's parameter server, as training uses it: partitions of up to 4 MiB, a lease, a coordinator.

    worker   copies a gradient to its send buffer ─── push ───> server   sums, steps, answers
             copies the values            <────────────────────

The optimizer replaces the values by the sum, so that a worker can check the values that it has.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from benchmarks.server.role_processes import RoleAddress, RoleProcesses, Worker
from shoal.launch.helper_spawner import HelperSpawner
from shoal.parameter_server.cluster_config import ClusterConfig, ShardSettings
from shoal.parameter_server.events import StepRequest
from shoal.parameter_server.launcher import CoordinatorProcess, ServerPool
from shoal.parameter_server.optimizer_spec import recipe_of
from shoal.parameter_server.partitioning import ParamMeta, assign, partition, partition_bytes
from shoal.parameter_server.transport.key import new_key_file, read_key
from shoal.parameter_server.transport.settings import UNIX, Transport
from shoal.parameter_server.worker.client import WorkerClient
from shoal.parameter_server.worker.flat_params import FlatParams
from shoal.parameter_server.worker.socket_network import connect_to_servers


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


class Pusher(Worker):
    shares: ClassVar[bool] = True
    host: ClassVar[str] = UNIX
    encrypt: ClassVar[bool] = True

    def __init__(self, address: RoleAddress) -> None:
        super().__init__(address)
        self.nursery: HelperSpawner | None = None
        self.fleet: ServerPool | None = None
        self.client: WorkerClient | None = None
        self.times = 0

    def prepare(self, gradient: Tensor) -> None:
        self.close()
        self.times += 1
        self.gradient = gradient
        parameters = {"weight": nn.Parameter(torch.zeros_like(gradient))}
        shapes = {"weight": ParamMeta(len(gradient), torch.float32, 0)}
        self.parts = partition(shapes, partition_bytes(shapes, self.address.servers))
        self.flat = FlatParams(parameters, self.parts)
        job, file, host, port = self._fleet()
        transport = Transport(read_key(Path(file)), job, encrypt=self.encrypt)
        self.client = connect_to_servers(
            self.address.index, self.flat, (host, port), transport, shares=self.shares
        )
        self.pieces = gradient.split([part.length for part in self.parts])
        self.present = [b"\1" * len(part.segments) for part in self.parts]
        self.order = StepRequest([{"lr": 1.0}])
        if self.address.index == 0:
            self.client.load([[{}] for _ in self.parts])
            (Path(self.address.folder) / f"loaded-{self.times}").touch()
        else:
            _await(Path(self.address.folder) / f"loaded-{self.times}")
        self.client.mark_current()

    def round(self) -> Sequence[Tensor]:
        assert self.client is not None
        for number, piece in enumerate(self.pieces):
            self.client.push(number, piece, self.present[number])
        self.client.request_step(self.order)
        self.client.wait(range(len(self.parts)))
        return self.flat.values

    def close(self) -> None:
        if self.client is not None:
            self.client.close()
        if self.fleet is not None and self.nursery is not None:
            self.fleet.close(30.0)
            self.nursery.close()
        self.client = self.fleet = self.nursery = None

    def _fleet(self) -> tuple[str, str, str, int]:
        """The first worker starts the servers; the others find them by a file."""
        folder = Path(self.address.folder) / f"fleet-{self.times}"
        told = folder / "told"
        if self.address.index == 0:
            folder.mkdir()
            recipe = recipe_of(Replace([nn.Parameter(torch.zeros(1))]))
            owners, key_file = tuple(assign(self.parts, self.address.servers)), new_key_file(folder)
            settings = ShardSettings(
                tuple(self.parts), recipe, self.address.workers, staleness=0, lease_s=10.0
            )
            transport = Transport(read_key(key_file), str(self.times), encrypt=self.encrypt)
            job = ClusterConfig(transport, folder, settings, owners, self.address.servers)
            self.nursery = HelperSpawner()
            judge = CoordinatorProcess(self.nursery, job, self.host)
            self.fleet = ServerPool(self.nursery, job, judge.address, self.host, judge)
            told.with_suffix(".tmp").write_text(json.dumps(judge.address))
            told.with_suffix(".tmp").rename(told)
        _await(told)
        host, port = json.loads(told.read_text())
        return str(self.times), str(folder / "server.key"), host, port


def _await(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


class Candidate(RoleProcesses):
    worker = Pusher

    @staticmethod
    def serve(address: RoleAddress, announce: Callable[[Any], None]) -> None:
        """The fleet is the first worker's: its processes are counted there."""
        announce(None)
