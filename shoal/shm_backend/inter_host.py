"""An all-reduce over several hosts: shared memory inside each, Gloo between them, every rank for a
piece of its own.

      host A   rank 0   a0 b0       [1] inside    A01         [2] between    A         [3] inside    A B
               rank 1   a1 b1           ──────>       B01         ──────>        B         ──────>   A B
      host B   rank 2   a2 b2       scatter the   A23         reduce over    A         gather the    A B
               rank 3   a3 b3       sums              B23     hosts              B     pieces        A B

A number crosses the wire between hosts once for each host, and not for each rank; all ranks of a
host use the wire at once. Numbers are added in the order of ranks on a host, then in the order of
hosts, wherever in the tensor they lie."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from shoal.errors import CollectiveFailed
from shoal.shm_backend import collectives, full_duplex
from shoal.shm_backend.call import CallSignature, decode
from shoal.shm_backend.phase_board import PhaseBoard, Steps
from shoal.shm_backend.reduce_kernels import reduce_into

ONE_MESSAGE_BYTES = (
    1 << 16
)  # up to here everybody sends everything: one message's time counts, and not its bytes


class InterHost:
    """This rank's connection to the ranks in the same place on the other hosts.

    Args:
        store: of the whole group.
        hosts: the ranks of each host, equally many on each.
        rank: this one.
    """

    def __init__(
        self, store: Store, hosts: Sequence[Sequence[int]], rank: int, timeout: timedelta
    ) -> None:
        self.at = next(number for number, ranks in enumerate(hosts) if rank in ranks)
        self.hosts, self.ranks = len(hosts), sum(map(len, hosts))
        place = hosts[self.at].index(rank)
        Gloo: Any = dist.ProcessGroupGloo  # noqa: N806 - a class
        self.gloo = Gloo(
            PrefixStore(f"between/{place}", store), self.at, self.hosts, timeout=timeout
        )

    def agree(self, call: CallSignature) -> None:
        """Make sure that the other hosts are in the same call. Collective.

        Raises: CollectiveFailed: one of them is not.
        """
        words = torch.empty(self.hosts, 1, dtype=torch.int64)
        self.gloo.allgather([list(words.unbind())], [torch.tensor([call.encoded])]).wait()
        for host, word in enumerate(words.flatten().tolist()):
            if word != call.encoded:
                raise CollectiveFailed(
                    f"host {self.at} of {self.hosts} calls {call.describe()} where host {host} "
                    "calls "
                    f"{decode(word).describe()}. All ranks of a group must make the same calls in "
                    "the same order."
                )

    def reduce(self, piece: Tensor, operation: str) -> None:
        """`piece` becomes the reduction over all hosts, in their order. Collective."""
        if self.hosts == 2 or piece.nbytes <= ONE_MESSAGE_BYTES:
            shown = torch.empty(self.hosts, piece.numel(), dtype=piece.dtype)
            full_duplex.all_gather(self.gloo, shown.unbind(), piece)
            reduce_into(piece, shown.unbind(), operation)
            return
        length = -(-piece.numel() // self.hosts)
        padded = piece.new_zeros(self.hosts * length)
        padded[: piece.numel()] = piece
        columns, own = torch.empty_like(padded), piece.new_empty(length)
        arriving, leaving = (
            columns.view(self.hosts, length).unbind(),
            padded.view(self.hosts, length).unbind(),
        )
        full_duplex.all_to_all(self.gloo, arriving, leaving)
        reduce_into(own, arriving, operation)
        full_duplex.all_gather(self.gloo, leaving, own)
        piece.copy_(padded[: piece.numel()])


def all_reduce(board: PhaseBoard, between: InterHost, tensor: Tensor, operation: str) -> Steps:
    """`tensor` becomes the reduction of all ranks' tensors on all hosts."""
    adding = "sum" if operation == "avg" else operation
    length = -(-tensor.numel() // board.size)
    whole = (
        tensor
        if tensor.numel() == board.size * length
        else tensor.new_zeros(board.size * length)
    )
    if whole is not tensor:
        whole[: tensor.numel()] = tensor
    rows, piece = whole.view(board.size, length).unbind(), tensor.new_empty(length)
    if board.size > 1:
        yield from collectives.reduce_scatter(board, piece, rows, adding)  # [1]
    else:
        piece.copy_(rows[0])
    between.agree(board.call)
    between.reduce(piece, adding)  # [2]
    if operation == "avg":
        piece.div_(between.ranks)
    yield from collectives.all_gather(board, piece, rows)  # [3]
    if whole is not tensor:
        tensor.copy_(whole[: tensor.numel()])
