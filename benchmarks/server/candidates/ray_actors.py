"""Ray actors, arrays in its object store, as Ray's parameter server example has it: the driver only
chains the calls.

    worker.push(sums) ──> shares ─┐                      a result lies in shared memory, and
    worker.push(sums) ──> shares ─┴─> server.add ──> sum    the next call reads it without a copy
         ^                                            │
         └────────────────────────────────────────────┘     next round

https://docs.ray.io/en/latest/ray-core/examples/plot_parameter_server.html
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.server.candidate import compare, gradient, shares, sum_factor
from benchmarks.server.role_processes import RoleAddress, RoleProcesses, Worker

# It reads these when it is imported.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
import ray

STORE_BYTES = 4 << 30
Array = NDArray[np.float32]


@ray.remote(num_cpus=0)
class Server:
    def __init__(self) -> None:
        self.sum = np.empty(0, np.float32)

    def add(self, first: Array, *others: Array) -> Array:
        if not others:
            return first
        if self.sum.shape != first.shape:
            self.sum = np.empty_like(first)
        np.add(first, others[0], out=self.sum)
        for other in others[1:]:
            self.sum += other
        return self.sum


@ray.remote(num_cpus=0)
class Pusher:
    def __init__(self, index: int, address: RoleAddress) -> None:
        self.index = index
        self.address = address

    def prepare(self, floats: int) -> None:
        self.gradient, self.held = gradient(self.index, floats).numpy(), ()

    def push(self, *sums: Array) -> tuple[Array, ...] | Array:
        self.held = sums
        pieces = tuple(
            self.gradient[cut] for cut in shares(len(self.gradient), self.address.servers)
        )
        return pieces if len(pieces) > 1 else pieces[0]

    def pull(self, *sums: Array) -> None:
        self.held = sums

    def check(self) -> None:
        factor = sum_factor(self.index, self.address.workers)
        held = [torch.from_numpy(piece.copy()) for piece in self.held]
        compare(f"worker {self.index}", held, torch.from_numpy(self.gradient), factor)


class Chief(Worker):
    def __init__(self, address: RoleAddress) -> None:
        super().__init__(address)
        self.folder = tempfile.TemporaryDirectory(
            prefix="ray"
        )  # of its own: sockets' paths must be short
        ray.init(
            num_cpus=address.workers + address.servers,
            include_dashboard=False,
            object_store_memory=STORE_BYTES,
            logging_level="ERROR",
            log_to_driver=False,
            _temp_dir=self.folder.name,
            _node_ip_address="127.0.0.1",
        )
        self.servers = [Server.remote() for _ in range(address.servers)]
        self.pushers = [Pusher.remote(index, address) for index in range(address.workers)]

    def prepare(self, gradient: Tensor) -> None:
        ray.get([pusher.prepare.remote(len(gradient)) for pusher in self.pushers])

    def round(self) -> Sequence[Tensor]:
        self.repeat(1)
        return []

    def repeat(self, rounds: int) -> None:
        sums: list[ray.ObjectRef] = []
        for _ in range(rounds):
            pushed = [
                pusher.push.options(num_returns=len(self.servers)).remote(*sums)
                for pusher in self.pushers
            ]
            by_server = zip(*pushed, strict=True) if len(self.servers) > 1 else [pushed]
            sums = [
                server.add.remote(*pieces)
                for server, pieces in zip(self.servers, by_server, strict=True)
            ]
        ray.get([pusher.pull.remote(*sums) for pusher in self.pushers])

    def check(self, gradient: Tensor, factor: Fraction) -> None:
        self.repeat(1)
        ray.get([pusher.check.remote() for pusher in self.pushers])

    def close(self) -> None:
        ray.shutdown()
        self.folder.cleanup()


class Candidate(RoleProcesses):
    worker, chief = Chief, True
