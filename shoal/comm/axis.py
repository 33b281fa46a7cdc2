"""Ranks that stand in one line, and what they say to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.comm.norm import to_local
from shoal.shm_backend.group import ShoalGroup
from shoal.shm_backend.registration import GLOO_BACKEND_NAME


@dataclass(frozen=True)
class Axis:
    """One line of ranks through the world: this rank's data-parallel group, say, or all ranks.

    Attributes: rank, size: this rank's place in its line. lines: all lines of this axis as numbers
        of the world; together they are the world. Empty for the world itself. group: of this rank's
        line; None for the default group, and where there is nobody else.
    """

    rank: int
    size: int
    device: torch.device
    all_groups: tuple[tuple[int, ...], ...] = ()
    group: dist.ProcessGroup | None = None

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The element-wise sum over all ranks of the line, in place. Collective."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """The element-wise maximum over all ranks of the line, in place. Collective."""
        if self.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor

    def broadcast_tensor(self, tensor: Tensor) -> None:
        """Every rank takes the first rank's, in place; of a DTensor, its shard. Collective."""
        if self.size > 1:
            dist.broadcast(to_local(tensor), group=self.group, group_src=0)

    def broadcast_module(self, module: nn.Module) -> None:
        """Every rank takes the first rank's parameters and buffers. Collective."""
        for tensor in (*module.parameters(), *module.buffers()):
            self.broadcast_tensor(tensor.detach())

    def broadcast_buffers(self, module: nn.Module) -> None:
        """Every rank takes the first rank's buffers, BatchNorm's running statistics above all.
        Collective.
        """
        for buffer in module.buffers():
            self.broadcast_tensor(buffer)

    def broadcast_str(self, text: str) -> str:
        """The first rank's text on every rank, as bytes: nothing is unpickled. Collective."""
        if self.size == 1:
            return text
        data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=self.device)
        length = torch.tensor([len(data)], device=self.device)
        self.broadcast_tensor(length)
        data = (
            data
            if self.rank == 0
            else torch.empty(int(length), dtype=torch.uint8, device=self.device)
        )
        self.broadcast_tensor(data)
        return bytes(data.tolist()).decode()

    def all_gather_str(self, text: str) -> list[str]:
        """Every rank's text, on every rank, as bytes: nothing is unpickled. Collective."""
        if self.size == 1:
            return [text]
        data = torch.tensor(list(text.encode()), dtype=torch.int64, device=self.device)
        lengths = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        lengths[self.rank] = len(data)
        table = torch.zeros(
            self.size, int(self.all_reduce(lengths).max()), dtype=torch.int64, device=self.device
        )
        table[self.rank, : len(data)] = data
        rows = self.all_reduce(table).cpu()
        return [
            bytes(row[:length].tolist()).decode()
            for row, length in zip(rows, lengths.tolist(), strict=True)
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy of a model talks to the same ranks."""
        return self

    def new_group(self) -> dist.ProcessGroup | None:
        """A Gloo group of this line for what goes on beside training; None for one rank.
        Collective over the world.
        """
        beside = GLOO_BACKEND_NAME if isinstance(dist.group.WORLD, ShoalGroup) else "gloo"
        return new_group(self.all_groups, backend=beside) if self.size > 1 else None

    def barrier(self) -> None:
        """Wait until every rank is here. Collective."""
        if self.size > 1:
            dist.barrier(group=self.group)


def new_group(lines: Sequence[Sequence[int]], backend: str | None = None) -> dist.ProcessGroup:
    """Make a group of each line; this rank's. No lines: one group of all. Collective over the
    world.
    """
    if not lines:
        group: dist.ProcessGroup = dist.new_group(backend=backend)
        return group
    mine: dist.ProcessGroup | None = None
    for line in lines:
        made = dist.new_group(list(line), backend=backend)
        mine = made if dist.get_rank() in line else mine
    assert mine is not None, f"rank {dist.get_rank()} is in none of {lines}"
    return mine
