"""pyzmq echo over TCP, without copies where pyzmq can: parts of 4 MiB, all sent at once, taken as
they come back.

ZeroMQ cannot receive into memory of ours, so a worker copies each part to its address.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import zmq
from torch import Tensor

from benchmarks.server.candidate import shares
from benchmarks.server.role_processes import RoleAddress, RoleProcesses, Worker
from benchmarks.server.wire import FLOAT_BYTES, PART_BYTES, parts


class Echo(Worker):
    def __init__(self, address: RoleAddress) -> None:
        super().__init__(address)
        self.context = zmq.Context()
        self.sockets = [self.context.socket(zmq.DEALER) for _ in address.addresses]
        for connection, endpoint in zip(self.sockets, address.addresses, strict=True):
            connection.connect(endpoint)

    def prepare(self, gradient: Tensor) -> None:
        self.gradient, self.held = gradient, torch.zeros_like(gradient)

    def round(self) -> Sequence[Tensor]:
        cuts = shares(len(self.gradient), self.address.servers)
        for connection, cut in zip(self.sockets, cuts, strict=True):
            for part in parts(self.gradient[cut]):
                connection.send(part, copy=False)
        for connection, cut in zip(self.sockets, cuts, strict=True):
            for part in self.held[cut].split(PART_BYTES // FLOAT_BYTES):
                part.copy_(
                    torch.frombuffer(connection.recv(copy=False).buffer, dtype=torch.float32)
                )
        return [self.held]

    def close(self) -> None:
        for connection in self.sockets:
            connection.send(b"")
            connection.close()
        self.context.term()


class Candidate(RoleProcesses):
    worker, sums = Echo, False

    @staticmethod
    def serve(address: RoleAddress, announce: Callable[[str], None]) -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            announce(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
            present = address.workers
            while present:
                sender, part = router.recv_multipart(copy=False)
                if part.buffer:
                    router.send_multipart([sender, part], copy=False)
                else:
                    present -= 1
