"""An all-reduce of one tensor, in place, by each library: `reduce(tensor)` on every rank is
done when it returns.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.shm_backend.segment import Segment, SharedSegment, attach

WORDS_BYTES = 4096


class Candidate(Protocol):
    name: str

    def __init__(self, largest_bytes: int) -> None: ...

    def reduce(self, tensor: Tensor) -> None: ...


class Shoal:
    """torch.distributed with the backend of this project."""

    name, backend = "shoal", "cpu:shoal"

    def __init__(self, largest_bytes: int) -> None:
        self.group = dist.new_group(backend=self.backend)

    def reduce(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self.group)


class Gloo(Shoal):
    """torch.distributed with the backend that it has for CPUs."""

    name, backend = "Gloo", "gloo"


class OpenMpi:
    """Open MPI's own shared memory, by mpi4py. Its ranks must be started by mpirun."""

    name = "Open MPI"

    def __init__(self, largest_bytes: int) -> None:
        from mpi4py import MPI

        self.world, self.in_place = MPI.COMM_WORLD, MPI.IN_PLACE
        if self.world.Get_size() != dist.get_world_size():
            raise ImportError("not started by mpirun")

    def reduce(self, tensor: Tensor) -> None:
        self.world.Allreduce(self.in_place, tensor.numpy())


class Horovod:
    """Over Gloo, which is what it has for CPUs without MPI. Its ranks must be told where to
    meet, as by horovodrun.
    """

    name = "Horovod"

    def __init__(self, largest_bytes: int) -> None:
        import horovod.torch as hvd
        from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
        from horovod.runner.http.http_server import RendezvousServer

        rank, size, port = dist.get_rank(), dist.get_world_size(), [0]
        if rank == 0:
            self.server = RendezvousServer(verbose=0)
            port[0] = self.server.start()
            self.server.init(get_host_assignments(parse_hosts(f"localhost:{size}"), size))
        dist.broadcast_object_list(port)
        places = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
        places |= {"CROSS_RANK": 0, "CROSS_SIZE": 1}
        ways = {"CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo", "HOSTNAME": "localhost"}
        meeting = {"GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "GLOO_RENDEZVOUS_PORT": port[0]}
        settings = {**places, **ways, **meeting, "GLOO_IFACE": "lo"}
        os.environ |= {f"HOROVOD_{key}": str(value) for key, value in settings.items()}
        hvd.init()
        self.hvd = hvd

    def reduce(self, tensor: Tensor) -> None:
        self.hvd.allreduce_(tensor, op=self.hvd.Sum, name="tensor")


class DeepSpeed:
    """Its shared-memory all-reduce, which it has for inference. It is compiled when it is first
    used.
    """

    name = "DeepSpeed"

    def __init__(self, largest_bytes: int) -> None:
        os.environ.setdefault("LOCAL_SIZE", str(dist.get_world_size()))
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed.comm

        deepspeed.comm.init_distributed(dist_backend="gloo")
        if deepspeed.comm.comm.cdb.shm_comm_op is None:  # it would hand everything on to Gloo
            raise ImportError("its shared memory could not be compiled")
        self.comm = deepspeed.comm

    def reduce(self, tensor: Tensor) -> None:
        self.comm.inference_all_reduce(tensor)


class HandMade:
    """The limit: two copies and a sum, with nothing around them: no checks, no errors, no
    time-out, spinning only.
    """

    name = "by hand"

    def __init__(self, largest_bytes: int) -> None:
        self.rank, self.size, self.turn = dist.get_rank(), dist.get_world_size(), 0
        own = SharedSegment(WORDS_BYTES + 2 * largest_bytes)
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, own.description)
        others = {
            rank: attach(description) for rank, description in enumerate(found) if rank != self.rank
        }
        dist.barrier()
        own.close()
        self.memories: list[Segment] = [others.get(rank) or own for rank in range(self.size)]
        self.turns = [memory.raw(0, 64).cast("q") for memory in self.memories]
        self.second = largest_bytes
        self.views: dict[int, list[list[Tensor]]] = {}

    def reduce(self, tensor: Tensor) -> None:
        shown, summed = self._views(tensor)
        cuts = [piece.numel() for piece in tensor.chunk(self.size)]
        shown[self.rank].copy_(tensor)
        self._meet()
        mine = [rows.split(cuts)[self.rank] for rows in shown]
        out = summed[self.rank].split(cuts)[self.rank]
        torch.add(mine[0], mine[1], out=out)
        for other in mine[2:]:
            out.add_(other)
        self._meet()
        for rank, piece in enumerate(tensor.split(cuts)):
            piece.copy_(summed[rank].split(cuts)[rank])

    def _views(self, tensor: Tensor) -> list[list[Tensor]]:
        length = tensor.numel()
        if length not in self.views:
            self.views[length] = [
                [memory.tensor(at, length, tensor.dtype) for memory in self.memories]
                for at in (WORDS_BYTES, WORDS_BYTES + self.second)
            ]
        return self.views[length]

    def _meet(self) -> None:
        self.turn += 1
        self.turns[self.rank][0] = self.turn
        for words in self.turns:
            looks = 0
            while words[0] < self.turn:
                looks += 1
                if looks > 50:
                    os.sched_yield()


class Copy:
    """Not an all-reduce: one copy of the tensor, on every rank at once."""

    name = "memcpy"

    def __init__(self, largest_bytes: int) -> None:
        self.room = torch.zeros(largest_bytes // 4)

    def reduce(self, tensor: Tensor) -> None:
        self.room[: tensor.numel()].copy_(tensor)


ALL = {kind.name: kind for kind in (Shoal, Gloo, OpenMpi, Horovod, DeepSpeed, HandMade, Copy)}


def all_that_there_are(
    names: Sequence[str], largest_bytes: int
) -> tuple[list[Candidate], Mapping[str, str]]:
    """The candidates of these names, and why some are missing. Collective."""
    found: list[Candidate] = []
    missing = {}
    for kind in (ALL[name] for name in names):
        try:
            found.append(kind(largest_bytes))
        except ImportError as error:
            missing[kind.name] = str(error)
    return found, missing
