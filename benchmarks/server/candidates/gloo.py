"""No server: all_reduce of torch.distributed, in place, as DistributedDataParallel calls it on
its buckets.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.server.candidate import Missing
from benchmarks.server.role_processes import RoleAddress, RoleProcesses, Worker


class Member(Worker):
    def __init__(self, address: RoleAddress) -> None:
        super().__init__(address)
        dist.init_process_group(
            "gloo", f"file://{address.folder}/store", rank=address.index, world_size=address.workers
        )

    def prepare(self, gradient: Tensor) -> None:
        self.gradient, self.held = gradient, torch.zeros_like(gradient)

    def begin(self) -> None:
        self.held.copy_(self.gradient)

    def round(self) -> Sequence[Tensor]:
        # The rounds of a turn sum what the round before has left: larger numbers, the same work.
        dist.all_reduce(self.held)
        return [self.held]

    def close(self) -> None:
        dist.destroy_process_group()


class Candidate(RoleProcesses):
    worker = Member

    def __init__(self, workers: int, servers: int) -> None:
        if workers == 1:
            raise Missing("one process has nothing to reduce")
        super().__init__(workers, 0)
