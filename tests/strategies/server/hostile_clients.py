"""Connections that a server must refuse, and the bytes that they send."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from shoal.errors import WireError
from shoal.parameter_server.codec import Op
from shoal.parameter_server.transport.connection import Header, pack
from shoal.parameter_server.transport.key import Key
from shoal.parameter_server.transport.settings import MAGIC, VERSION, Transport, _connected
from shoal.parameter_server.transport.stream import Stream

NOBODY, NOBODY_EITHER = 77, 78
"""Workers' numbers that the job does not have. Who comes under a number that is there replaces
it.
"""
LIMIT_S = 20


@dataclass(frozen=True)
class Target:
    """A server or the coordinator of a running job, for a client that has its key."""

    address: tuple[str, int]
    transport: Transport
    listener: int | str

    def reach(self) -> socket.socket:
        return _connected(self.address, LIMIT_S)

    def shake(self, number: int = NOBODY) -> Stream:
        return self.transport.connect(self.address, self.listener, number)._stream


Stranger = Callable[[Target, Random], None]


def says(target: Target, words: bytes) -> None:
    """Send words in place of a handshake, until the peer closes."""
    with target.reach() as sock, contextlib.suppress(ConnectionError):
        sock.sendall(words)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):
            pass


def says_something_random(target: Target, chance: Random) -> None:
    says(target, chance.randbytes(chance.randrange(1, 4000)))


def greets_and_goes_on_at_random(target: Target, chance: Random) -> None:
    says(
        target, MAGIC + VERSION.to_bytes(2, "little") + chance.randbytes(chance.randrange(36, 4000))
    )


def speaks_another_version(target: Target, chance: Random) -> None:
    says(target, MAGIC + (VERSION + 1).to_bytes(2, "little") + chance.randbytes(36))


def holds_another_key(target: Target, chance: Random) -> None:
    other = replace(target, transport=replace(target.transport, key=Key(chance.randbytes(32))))
    with contextlib.suppress(WireError):
        other.shake()


def is_of_another_job(target: Target, chance: Random) -> None:
    other = replace(target, transport=replace(target.transport, job="another"))
    with contextlib.suppress(WireError):
        other.shake()


def sends(target: Target, header: Header, payload: bytes = b"") -> None:
    """Send a frame after a handshake, until the peer closes."""
    stream = target.shake()
    with contextlib.closing(stream), contextlib.suppress(WireError):
        stream.send(pack(header) + payload)
        while True:
            stream.receive(memoryview(bytearray(1)))


def announces_more_than_there_is_memory_for(target: Target, chance: Random) -> None:
    sends(target, Header(Op.PUSH, length=2 ** chance.randrange(40, 63)))


def pushes_though_it_is_no_worker(target: Target, chance: Random) -> None:
    sends(target, Header(Op.PUSH, length=64, partition=chance.randrange(2**32)), bytes(64))


def sends_an_order_that_is_none(target: Target, chance: Random) -> None:
    sends(target, Header(Op.STEP, length=9), b'{"a": [}}')


def knows_no_message(target: Target, chance: Random) -> None:
    sends(target, Header(chance.randrange(100, 256)))


WITHOUT_KEY: list[Stranger] = [
    says_something_random,
    greets_and_goes_on_at_random,
    speaks_another_version,
    holds_another_key,
    is_of_another_job,
]
WITH_KEY: list[Stranger] = [
    announces_more_than_there_is_memory_for,
    pushes_though_it_is_no_worker,
    sends_an_order_that_is_none,
    knows_no_message,
]


def cut_a_frame_short(target: Target) -> None:
    """Leave half a frame, as a worker that dies. Not refused: no peer is there any more."""
    # The server may see an earlier connection of this number later, and then end this one.
    with contextlib.closing(target.shake(NOBODY_EITHER)) as stream, contextlib.suppress(WireError):
        stream.send(pack(Header(Op.PUSH, length=1000)) + bytes(500))
