"""Messages between two ranks of a group, of which all algorithms in this folder are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp


class PairwiseLink:
    """Messages between the members of a group. Members are numbered from 0.

    Args:
        group: used by one thread only. None for all ranks of the world.
        members: ranks of the group that take part, in the order of their numbers; empty for all.

    Attributes:
        rank, size: the number of this member, and the number of members.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, members: Sequence[int] = ()) -> None:
        self._group = group
        self._members = list(members) or list(range(dist.get_world_size(group)))
        self.rank, self.size = self._members.index(dist.get_rank(group)), len(self._members)

    def send(self, tensor: Tensor, to: int) -> None:
        """Send `tensor`. For an empty tensor no method sends or receives a message.

        Returns when the tensor may be changed.

        Raises:
            RuntimeError: the other rank has ended, has given up or is late by the group's time-out.
                A group of backend "shoal" says which one it is.
        """
        self._transfer([(dist.isend, tensor, to)])

    def receive(self, into: Tensor, source: int) -> None:
        """Receive a message from `source` into `into`. Raises as `send` does."""
        self._transfer([(dist.irecv, into, source)])

    def exchange(self, tensor: Tensor, to: int, into: Tensor, source: int) -> None:
        """Send and receive at the same time, so that ranks in a circle do not deadlock.

        The receive starts first: otherwise Gloo would use one direction of a link after the other
        (shoal/comm/equal_chunks.py)."""
        self._transfer([(dist.irecv, into, source), (dist.isend, tensor, to)])

    def _transfer(self, operations: Sequence[tuple[Callable[..., object], Tensor, int]]) -> None:
        """Start all operations, each (function, tensor, member), and wait for all."""
        messages = [
            P2POp(function, tensor, group=self._group, group_peer=self._members[member])
            for function, tensor, member in operations
            if tensor.numel()
        ]
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()
