"""An all-reduce over several hosts: shared memory inside each host, Gloo between hosts.

      host A   rank 0   a0 b0     [1] inside   A01       [2] between   A       [3] inside   A B
               rank 1   a1 b1         ─────>       B01       ─────>      B         ─────>   A B
      host B   rank 2   a2 b2     reduce-      A23       all-reduce    A       all-gather   A B
               rank 3   a3 b3     scatter          B23   over hosts      B                  A B

Each rank reduces one piece between hosts, with the ranks of the same index on the other hosts. So a
value crosses the network once for each host and not for each rank, and all ranks of a host use the
network at once. Values are added in the order of ranks on a host, then in the order of hosts, at
every position in the tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from shoal.errors import CollectiveFailed
from shoal.platform.torch_private.c10d import make_gloo
from shoal.shm_backend import collectives, full_duplex, pairwise_exchange
from shoal.shm_backend.call import CallSignature, decode
from shoal.shm_backend.gloo_calls import counted_wait
from shoal.shm_backend.phase_board import PhaseBoard, Steps
from shoal.shm_backend.reduce_kernels import reduce_into
from shoal.watchdog.progress_writer import own_progress

# Up to here each rank sends its full piece to all: the time of a message counts, not its bytes.
ONE_MESSAGE_BYTES = 1 << 16


class InterHost:
    """The connection of this rank to the ranks of the same index on the other hosts.

    Args:
        store: of the full group.
        hosts: the ranks of each host, equally many on each.
        rank: this rank.
        timeout: returns the group's present timeout, for each message.
    """

    def __init__(
        self,
        store: Store,
        hosts: Sequence[Sequence[int]],
        rank: int,
        timeout: Callable[[], timedelta],
    ) -> None:
        self.host = next(index for index, ranks in enumerate(hosts) if rank in ranks)
        self.num_hosts = len(hosts)
        self.num_ranks = sum(map(len, hosts))
        index_on_host = hosts[self.host].index(rank)
        store = PrefixStore(f"between/{index_on_host}", store)
        self._timeout, self._limit = timeout, timeout()
        self.gloo: Any = make_gloo(store, self.host, self.num_hosts, self._limit)

    def check_same(self, call: CallSignature) -> None:
        """Check that the other hosts make the same call. Collective.

        The phase board compares calls inside a host only.

        Raises: CollectiveFailed: a host makes another call.
        """
        if (limit := self._timeout()) != self._limit:
            self._limit = limit
            self.gloo.set_timeout(limit)
        words = torch.empty(self.num_hosts, 1, dtype=torch.int64)
        self.gloo.allgather([list(words.unbind())], [torch.tensor([call.encoded])]).wait()
        for host, word in enumerate(words.flatten().tolist()):
            if word != call.encoded:
                raise CollectiveFailed(
                    f"host {self.host} of {self.num_hosts} calls {call.describe()} where host "
                    f"{host} calls {decode(word).describe()}. All ranks of a group must make the "
                    "same calls in the same order."
                )

    def reduce(self, piece: Tensor, operation: str) -> None:
        """Reduce `piece` over all hosts in their order, in place. Collective."""
        if piece.nbytes <= ONE_MESSAGE_BYTES:
            terms = torch.empty(self.num_hosts, piece.numel(), dtype=piece.dtype)
            full_duplex.all_gather(self.gloo, terms.unbind(), piece)
            reduce_into(piece, terms.unbind(), operation)
            return
        pairwise_exchange.all_reduce(self.gloo, piece, operation)


def all_reduce(board: PhaseBoard, inter_host: InterHost, tensor: Tensor, operation: str) -> Steps:
    """Reduce `tensor` over all ranks of all hosts, in place."""
    # A mean is a sum until the number of all ranks divides it.
    summing = "sum" if operation == "avg" else operation
    length = -(-tensor.numel() // board.size)
    padded = tensor
    if tensor.numel() != board.size * length:
        padded = tensor.new_zeros(board.size * length)
        padded[: tensor.numel()] = tensor
    rows = padded.view(board.size, length).unbind()
    piece = tensor.new_empty(length)
    if board.size > 1:
        yield from collectives.reduce_scatter(board, piece, rows, summing)  # [1]
    else:
        piece.copy_(rows[0])
    with counted_wait(own_progress().waiting()):
        inter_host.check_same(board.call)
        inter_host.reduce(piece, summing)  # [2]
    if operation == "avg":
        piece.div_(inter_host.num_ranks)
    yield from collectives.all_gather(board, piece, rows)  # [3]
    if padded is not tensor:
        tensor.copy_(padded[: tensor.numel()])
