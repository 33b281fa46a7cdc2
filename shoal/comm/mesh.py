"""The one owner of process groups: this rank's place among all ranks, its device, and how to leave."""

from __future__ import annotations

import atexit
import gc
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.errors import EnvironmentConflict
from shoal.launch.environment import Place
from shoal.launch.nursery import Nursery

TIMEOUT = timedelta(minutes=30)


class Holder(Protocol):
    """What keeps a process group alive, until it is told to let go."""

    def close(self) -> None: ...


_holders: WeakSet[Holder] = WeakSet()


@dataclass(frozen=True)
class Mesh:
    """Where this rank stands. `size` ranks in all; axes for tensor and pipeline groups belong here as well."""

    rank: int
    size: int
    device: torch.device
    place: Place
    nursery: Nursery | None = None
    """On one rank of each machine, where a strategy has asked for it: starts helper processes."""

    def sum(self, tensor: Tensor) -> Tensor:
        """The element-wise sum over all ranks, in place. Collective."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def broadcast_tensor(self, tensor: Tensor) -> None:
        """Every rank takes rank 0's, in place. Collective."""
        if self.size > 1:
            dist.broadcast(tensor, src=0)

    def broadcast(self, module: nn.Module) -> None:
        """Every rank takes rank 0's parameters and buffers. Collective."""
        for tensor in (*module.parameters(), *module.buffers()):
            self.broadcast_tensor(tensor.detach())

    def broadcast_buffers(self, module: nn.Module) -> None:
        """Every rank takes rank 0's buffers, BatchNorm's running statistics above all. Collective."""
        for buffer in module.buffers():
            self.broadcast_tensor(buffer)

    def broadcast_text(self, text: str) -> str:
        """Rank 0's text on every rank, as bytes: nothing is unpickled. Collective."""
        if self.size == 1:
            return text
        data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=self.device)
        length = torch.tensor([len(data)], device=self.device)
        dist.broadcast(length, src=0)
        data = data if self.rank == 0 else torch.empty(int(length), dtype=torch.uint8, device=self.device)
        dist.broadcast(data, src=0)
        return bytes(data.tolist()).decode()

    def gather_text(self, text: str) -> list[str]:
        """Every rank's text, on every rank, as bytes: nothing is unpickled. Collective."""
        if self.size == 1:
            return [text]
        data = torch.tensor(list(text.encode()), dtype=torch.int64, device=self.device)
        lengths = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        lengths[self.rank] = len(data)
        table = torch.zeros(self.size, int(self.sum(lengths).max()), dtype=torch.int64, device=self.device)
        table[self.rank, : len(data)] = data
        rows = self.sum(table).cpu()
        return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths.tolist(), strict=True)]

    def new_group(self) -> dist.ProcessGroup | None:
        """A Gloo group of all ranks for what goes on beside training; None in a world of one. Collective."""
        return dist.new_group(backend="gloo") if self.size > 1 else None

    def barrier(self) -> None:
        """Wait until every rank is here. Collective."""
        if self.size > 1:
            dist.barrier()


def join(place: Place, helpers: bool = False) -> Mesh:
    """Take this process's place in the world. Collective; a world of one talks to nobody.

    A process group that the program itself has set up is used as it is.

    Args: helpers: a strategy wants processes of its own beside the ranks.

    Raises: EnvironmentConflict: that group is another world than the launcher's variables tell of.
    """
    if dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) != (place.rank, place.world):
        raise EnvironmentConflict(
            f"the program's own process group says rank {dist.get_rank()} of {dist.get_world_size()}, the environment "
            f"{place.describe()}. Set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE for it, or let shoal.init() "
            "make the group."
        )
    nursery = Nursery() if helpers and place.local_rank == 0 else None  # before there are threads and connections
    device = _device(place)
    if place.world > 1 and not dist.is_initialized():
        if place.master_address is not None:
            os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = place.master_address, str(place.master_port)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, rank=place.rank, world_size=place.world, timeout=TIMEOUT)
        # A group that is still open while the interpreter goes down can end a good run with an error.
        atexit.register(leave)
    return Mesh(place.rank, place.world, device, place, nursery)


def close_before_leaving(holder: Holder) -> None:
    """Have `holder` closed before the process group is."""
    _holders.add(holder)


def ensure_group() -> None:
    """Make a process group for a world of one, for engines that need one in any world."""
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]  # torch documents it, its stubs leave it out
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        atexit.register(leave)


def leave() -> None:
    """Close the process group, if there is one.

    It must not outlive this call: its threads may still have Python objects to give back, which ends the process with
    SIGABRT once the interpreter is going down (two runs in fifteen under torchrun, with torch 2.13).
    """
    for holder in list(_holders):
        holder.close()
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


def _device(place: Place) -> torch.device:
    """This rank's GPU where there are enough of them for all local ranks, else the CPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # Slurm and MPI can bind each rank to a GPU of its own, which is then the only one that it sees.
    bound = count == 1 and place.launcher in ("slurm", "mpi")
    if not bound and count < place.local_world:
        return torch.device("cpu")
    device = torch.device("cuda", 0 if bound else place.local_rank)
    torch.cuda.set_device(device)
    return device
