"""Bound: blocking sockets; a part of 4 MiB goes to the server and comes back, then the next one.

worker   sendall  recv_into    sendall  recv_into ...      one thread for each server; a header of 8 bytes says
server   recv_into  sendall    recv_into  sendall ...      how long a part is
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from benchmarks.server.candidate import shares
from benchmarks.server.role_processes import Crew, Place, Worker
from benchmarks.server.wire import PART_BYTES, accept_all, connect, fill, parts

HEADER = struct.Struct("<Q")  # bytes that follow


class Echo(Worker):
    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.connections = [connect(port) for port in place.addresses]
        self.threads = ThreadPoolExecutor(place.servers)

    def prepare(self, gradient: Tensor) -> None:
        self.gradient, self.held = gradient, torch.zeros_like(gradient)

    def round(self) -> Sequence[Tensor]:
        cuts = shares(len(self.gradient), self.place.servers)
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


class Candidate(Crew):
    worker, sums = Echo, False

    @staticmethod
    def serve(place: Place, announce: Callable[[int], None]) -> None:
        accept_all(socket.create_server(("127.0.0.1", 0)), place.workers, announce, _send_back)


def _send_back(connection: socket.socket) -> None:
    header, buffer = memoryview(bytearray(HEADER.size)), memoryview(bytearray(PART_BYTES))
    while fill(connection, header):
        part = buffer[: HEADER.unpack(header)[0]]
        fill(connection, part)
        connection.sendall(header)
        connection.sendall(part)
