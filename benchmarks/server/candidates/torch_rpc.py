"""torch.distributed.rpc with TensorPipe's own choice of transports, as PyTorch's tutorial on
batched RPC does it.

    worker   rpc_async(share) ─┐                    ┌─> the sum is the reply, a tensor of its own
    worker   rpc_async(share) ─┴─ add, last one in ─┴─> set_result

https://docs.pytorch.org/tutorials/intermediate/rpc_async_execution.html
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.distributed.rpc as rpc
from torch import Tensor
from torch.futures import Future

from benchmarks.server.candidate import shares
from benchmarks.server.role_processes import RoleAddress, RoleProcesses, Worker


class Shard:
    """Sums what the workers push in one round."""

    def __init__(self) -> None:
        self.lock, self.sum, self.pushed, self.reply = threading.Lock(), torch.empty(0), 0, Future()

    def push(self, gradient: Tensor, workers: int) -> Future[Tensor]:
        with self.lock:
            # The first tensor of a round has arrived in memory of its own, which may as well hold
            # the sum.
            self.sum = self.sum.add_(gradient) if self.pushed else gradient
            self.pushed += 1
            reply = self.reply
            if self.pushed == workers:
                self.pushed, self.reply = 0, Future()
                reply.set_result(self.sum)
            return reply


@cache
def shard() -> Shard:
    """The one of this process: a function that is called from afar can be given no other."""
    return Shard()


@rpc.functions.async_execution
def push(gradient: Tensor, workers: int) -> Future[Tensor]:
    return shard().push(gradient, workers)


class Client(Worker):
    def __init__(self, address: RoleAddress) -> None:
        super().__init__(address)
        _join(f"worker{address.index}", address, address.servers + address.index)

    def prepare(self, gradient: Tensor) -> None:
        self.gradient, self.held = gradient, []

    def round(self) -> Sequence[Tensor]:
        pieces = [self.gradient[cut] for cut in shares(len(self.gradient), self.address.servers)]
        workers = self.address.workers
        replies = [
            rpc.rpc_async(f"server{k}", push, (piece, workers)) for k, piece in enumerate(pieces)
        ]
        self.held = [reply.wait() for reply in replies]
        return self.held

    def close(self) -> None:
        rpc.shutdown()


class Candidate(RoleProcesses):
    worker, spins = (
        Client,
        True,
    )  # TensorPipe looks at shared memory again and again, in every process

    @staticmethod
    def serve(address: RoleAddress, announce: Callable[[None], None]) -> None:
        announce(None)
        _join(f"server{address.index}", address, address.index)
        rpc.shutdown()  # waits for the workers to call it too


def _join(name: str, address: RoleAddress, rank: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{address.folder}/store", rpc_timeout=0
    )
    rpc.init_rpc(
        name, rank=rank, world_size=address.servers + address.workers, rpc_backend_options=options
    )
