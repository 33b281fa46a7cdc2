"""Bound: a part of 4 MiB is copied to shared memory by the worker and read and rewritten there by
the server.

    worker   gradient -copy-> [slot] ............. [slot] -copy-> values
    server               bell   [slot] -copy-> own -copy-> [slot]   bell

The bell is a message on a Unix socket: the slot now belongs to the receiver.

Each connection has two slots, so that the worker fills one while the server has the other.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from benchmarks.server.candidate import shares
from benchmarks.server.role_processes import RoleAddress, RoleProcesses, Worker
from benchmarks.server.wire import FLOAT_BYTES, PART_BYTES, accept_all

BELL = struct.Struct("<II")  # which slot, and how many numbers are in it
SLOTS = 2
SLOT_FLOATS = PART_BYTES // FLOAT_BYTES


class Echo(Worker):
    def __init__(self, address: RoleAddress) -> None:
        super().__init__(address)
        self.bells, self.slots = zip(*(_share(server) for server in address.addresses), strict=True)
        self.threads = ThreadPoolExecutor(address.servers)

    def prepare(self, gradient: Tensor) -> None:
        self.gradient, self.held = gradient, torch.zeros_like(gradient)

    def round(self) -> Sequence[Tensor]:
        cuts = shares(len(self.gradient), self.address.servers)
        list(self.threads.map(self._exchange, self.bells, self.slots, cuts))
        return [self.held]

    def close(self) -> None:
        for bell in self.bells:
            bell.close()

    def _exchange(self, bell: socket.socket, slots: Tensor, cut: slice) -> None:
        pushed, pulled = self.gradient[cut].split(SLOT_FLOATS), self.held[cut].split(SLOT_FLOATS)
        for part in range(len(pushed) + SLOTS):
            slot = part % SLOTS
            if part >= SLOTS:  # what was put into this slot has come back
                bell.recv(BELL.size)
                pulled[part - SLOTS].copy_(slots[slot, : len(pulled[part - SLOTS])])
            if part < len(pushed):
                slots[slot, : len(pushed[part])].copy_(pushed[part])
                bell.send(BELL.pack(slot, len(pushed[part])))


class Candidate(RoleProcesses):
    worker, sums = Echo, False

    @staticmethod
    def serve(address: RoleAddress, announce: Callable[[str], None]) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(f"{address.folder}/{address.index}")
        listener.listen()
        accept_all(listener, address.workers, announce, _rewrite)


def _share(address: str) -> tuple[socket.socket, Tensor]:
    """Connect, and hand over memory that has no name, so that none can be left behind."""
    bell = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    bell.connect(address)
    memory = os.memfd_create("slots")
    os.ftruncate(memory, SLOTS * PART_BYTES)
    socket.send_fds(bell, [b"x"], [memory])
    return bell, _map(memory)


def _map(memory: int) -> Tensor:
    """float32 of shape (SLOTS, SLOT_FLOATS). Closes the descriptor."""
    mapped = mmap.mmap(memory, SLOTS * PART_BYTES)
    os.close(memory)
    return torch.frombuffer(mapped, dtype=torch.float32).view(SLOTS, SLOT_FLOATS)


def _rewrite(bell: socket.socket) -> None:
    _, (memory,), _, _ = socket.recv_fds(bell, 1, 1)
    slots, own = _map(memory), torch.empty(SLOT_FLOATS)
    while message := bell.recv(BELL.size):
        slot, floats = BELL.unpack(message)
        part = slots[slot, :floats]
        part.copy_(own[:floats].copy_(part))
        bell.send(message)
