"""Messages between two ranks of a group: all that the algorithms beside this file are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp

from shoal.errors import CollectiveFailed, PeerLost


class PairwiseLink:
    """Ranks that send to each other, numbered from 0.

    Args:
        group: theirs alone: two threads must not share it. None for all ranks of the world.
        members: ranks of the group, where not all take part; they are numbered in this order.

    Attributes:
        rank, size: this rank's number; how many there are.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, members: Sequence[int] = ()) -> None:
        self._group = group
        self._members = list(members) or list(range(dist.get_world_size(group)))
        self.rank, self.size = self._members.index(dist.get_rank(group)), len(self._members)

    def send(self, tensor: Tensor, to: int) -> None:
        """Until `to` has taken it, or will. An empty tensor is no message, here and below.

        Raises: PeerLost: that rank has ended or has given up. CollectiveFailed: it is late by the
        group's time-out."""
        self._do([(dist.isend, tensor, to)])

    def receive(self, into: Tensor, source: int) -> None:
        """Until `source` has sent what fills `into`. Raises as `send` does."""
        self._do([(dist.irecv, into, source)])

    def exchange(self, tensor: Tensor, to: int, into: Tensor, source: int) -> None:
        """Send and receive at the same time, so that a circle of ranks that all do it does not wait
        for itself.

        The other way round, Gloo would fill one direction of a link after the other
        (shoal/shm_backend/full_duplex.py)."""
        self._do([(dist.irecv, into, source), (dist.isend, tensor, to)])

    def _do(self, wanted: Sequence[tuple[Callable[..., object], Tensor, int]]) -> None:
        messages = [message for message in wanted if message[1].numel()]
        if not messages:
            return
        peers = [self._members[peer] for _, _, peer in messages]
        blamed = peers
        try:
            works = dist.batch_isend_irecv([self._operation(*message) for message in messages])
            for work, peer in zip(works, peers, strict=True):
                blamed = [peer]
                work.wait()
        except RuntimeError as error:
            raise _failure([self._number(peer) for peer in blamed], str(error)) from None

    def _operation(self, kind: Callable[..., object], tensor: Tensor, peer: int) -> P2POp:
        return P2POp(kind, tensor, group=self._group, group_peer=self._members[peer])

    def _number(self, peer: int) -> int:
        """A rank of the group as it is known in the world."""
        return peer if self._group is None else dist.get_global_rank(self._group, peer)


def _failure(ranks: Sequence[int], problem: str) -> CollectiveFailed:
    """What broke, from Gloo's words for it."""
    who = " or ".join(f"rank {rank}" for rank in ranks)
    if "timed out" in problem.lower():
        return CollectiveFailed(
            f"{who} has not come to this all-reduce in time: {problem.splitlines()[0]}"
        )
    return PeerLost(
        f"the connection to {who} broke: it has died or given up ({problem.splitlines()[0]})"
    )
