"""Bound: blocking sockets; a part of 4 MiB goes to the server and comes back, then the next one.

worker   sendall  recv_into    sendall  recv_into ...      one thread for each server; a header of
server   recv_into  sendall    recv_into  sendall ...      8 bytes holds the length of a part
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from benchmarks.server.candidate import shares
from benchmarks.server.role_processes import RoleAddress, RoleProcesses, Worker
from benchmarks.server.wire import PART_BYTES, accept_all, connect, fill, parts

HEADER = struct.Struct("<Q")  # bytes that follow


class Echo(Worker):
    def __init__(self, address: RoleAddress) -> None:
        super().__init__(address)
        self.connections = [connect(port) for port in address.addresses]
        self.threads = ThreadPoolExecutor(address.servers)

    def prepare(self, gradient: Tensor) -> None:
        self.gradient, self.held = gradient, torch.zeros_like(gradient)

    def round(self) -> Sequence[Tensor]:
        cuts = shares(len(self.gradient), self.address.servers)
        list(self.threads.map(self._exchange, self.connections, cuts))
        return [self.held]

    def close(self) -> None:
        for connection in self.connections:
            connection.close()

    def _exchange(self, connection: socket.socket, cut: slice) -> None:
        header = memoryview(bytearray(HEADER.size))
        for pushed, pulled in zip(parts(self.gradient[cut]), parts(self.held[cut]), strict=True):
            connection.sendall(HEADER.pack(len(pushed)))
            connection.sendall(pushed)
            fill(connection, header)
            fill(connection, pulled)


class Candidate(RoleProcesses):
    worker, sums = Echo, False

    @staticmethod
    def serve(address: RoleAddress, announce: Callable[[int], None]) -> None:
        accept_all(socket.create_server(("127.0.0.1", 0)), address.workers, announce, _send_back)


def _send_back(connection: socket.socket) -> None:
    header, buffer = memoryview(bytearray(HEADER.size)), memoryview(bytearray(PART_BYTES))
    while fill(connection, header):
        part = buffer[: HEADER.unpack(header)[0]]
        fill(connection, part)
        connection.sendall(header)
        connection.sendall(part)
