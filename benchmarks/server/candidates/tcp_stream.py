"""Bound: blocking sockets; both directions at once, and the server sends back whatever has arrived,
however little.

worker   sendall ------------>      one thread for each server and direction
         <--------- recv_into
server   recv_into  sendall  recv_into  sendall ...     at most 4 MiB at a time, mostly one socket
                                                        buffer
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from benchmarks.server.candidate import shares
from benchmarks.server.role_processes import RoleAddress, RoleProcesses, Worker
from benchmarks.server.wire import PART_BYTES, accept_all, connect, fill, parts


class Echo(Worker):
    def __init__(self, address: RoleAddress) -> None:
        super().__init__(address)
        self.connections = [connect(port) for port in address.addresses]
        self.threads = ThreadPoolExecutor(2 * address.servers)

    def prepare(self, gradient: Tensor) -> None:
        self.gradient, self.held = gradient, torch.zeros_like(gradient)

    def round(self) -> Sequence[Tensor]:
        cuts = shares(len(self.gradient), self.address.servers)
        pushes = self.threads.map(self._push, self.connections, cuts)
        pulls = self.threads.map(self._pull, self.connections, cuts)
        list(pushes), list(pulls)
        return [self.held]

    def close(self) -> None:
        for connection in self.connections:
            connection.close()

    def _push(self, connection: socket.socket, cut: slice) -> None:
        for part in parts(self.gradient[cut]):
            connection.sendall(part)

    def _pull(self, connection: socket.socket, cut: slice) -> None:
        for part in parts(self.held[cut]):
            fill(connection, part)


class Candidate(RoleProcesses):
    worker, sums = Echo, False

    @staticmethod
    def serve(address: RoleAddress, announce: Callable[[int], None]) -> None:
        accept_all(socket.create_server(("127.0.0.1", 0)), address.workers, announce, _send_back)


def _send_back(connection: socket.socket) -> None:
    buffer = memoryview(bytearray(PART_BYTES))
    while received := connection.recv_into(buffer):
        connection.sendall(buffer[:received])
