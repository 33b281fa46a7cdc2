"""Connections that a server must refuse, and the bytes that they send."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import socket
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from shoal.errors import WireError
from shoal.parameter_server.codec import Op
from shoal.parameter_server.transport.frame import MAGIC, VERSION, Header, pack
from shoal.parameter_server.transport.handshake import Session, connect
from shoal.parameter_server.transport.secure_channel import MAC_BYTES

NOBODY, NOBODY_EITHER = 77, 78
"""Workers' numbers that the job does not have. Who comes under a number that is there replaces
it.
"""


@dataclass(frozen=True)
class Target:
    """A server or an arbiter of a job that runs, as one who holds its key knows it."""

    address: tuple[str, int]
    key: bytes
    job: str

    def reach(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=20)

    def shake(self, sock: socket.socket, number: int = NOBODY) -> Session:
        session = connect(sock, self.key, self.job, number)
        sock.settimeout(20)
        return session


def frame(session: Session, header: Header, payload: bytes = b"", sequence: int = 0) -> bytes:
    packed = pack(header, sequence)
    return packed + hmac.digest(session.send_key, packed, hashlib.sha256)[:MAC_BYTES] + payload


def say_no_more(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it was refused by then
        sock.shutdown(socket.SHUT_WR)


def says_something_random(target: Target, sock: socket.socket, chance: Random) -> None:
    sock.sendall(chance.randbytes(chance.randrange(1, 4000)))
    say_no_more(sock)


def greets_and_goes_on_at_random(target: Target, sock: socket.socket, chance: Random) -> None:
    sock.sendall(MAGIC + VERSION.to_bytes(2, "little") + chance.randbytes(chance.randrange(4000)))
    say_no_more(sock)


def speaks_another_version(target: Target, sock: socket.socket, chance: Random) -> None:
    sock.sendall(MAGIC + (VERSION + 1).to_bytes(2, "little") + chance.randbytes(32))


def holds_another_key(target: Target, sock: socket.socket, chance: Random) -> None:
    with contextlib.suppress(WireError):
        connect(sock, chance.randbytes(32), target.job, 0)


def is_of_another_job(target: Target, sock: socket.socket, chance: Random) -> None:
    with contextlib.suppress(WireError):
        connect(sock, target.key, f"other-{target.job}", 0)


def announces_more_than_there_is_memory_for(
    target: Target, sock: socket.socket, chance: Random
) -> None:
    session = target.shake(sock)
    sock.sendall(frame(session, Header(Op.PUSH, length=2 ** chance.randrange(40, 63))))


def repeats_a_frame(target: Target, sock: socket.socket, chance: Random) -> None:
    session = target.shake(sock)
    sock.sendall(2 * frame(session, Header(Op.STATS)))


def damages_a_header(target: Target, sock: socket.socket, chance: Random) -> None:
    session = target.shake(sock)
    damaged = bytearray(frame(session, Header(Op.PULL)))
    damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
    sock.sendall(damaged)


def pushes_though_it_is_no_worker(target: Target, sock: socket.socket, chance: Random) -> None:
    session = target.shake(sock)
    sock.sendall(
        frame(session, Header(Op.PUSH, length=64, partition=chance.randrange(2**32)), bytes(64))
    )


def sends_an_order_that_is_none(target: Target, sock: socket.socket, chance: Random) -> None:
    session = target.shake(sock)
    sock.sendall(frame(session, Header(Op.STEP, length=9), b'{"a": [}}'))


def knows_no_message(target: Target, sock: socket.socket, chance: Random) -> None:
    session = target.shake(sock)
    sock.sendall(frame(session, Header(chance.randrange(100, 256))))


Stranger = Callable[[Target, socket.socket, Random], None]
WITHOUT_KEY: list[Stranger] = [
    says_something_random,
    greets_and_goes_on_at_random,
    speaks_another_version,
    holds_another_key,
    is_of_another_job,
]
WITH_KEY: list[Stranger] = [
    announces_more_than_there_is_memory_for,
    repeats_a_frame,
    damages_a_header,
    pushes_though_it_is_no_worker,
    sends_an_order_that_is_none,
    knows_no_message,
]


def send(stranger: Stranger, target: Target, chance: Random) -> None:
    """One visit, until the other end has closed the connection."""
    with target.reach() as sock, contextlib.suppress(ConnectionError):
        stranger(target, sock, chance)
        while sock.fileno() >= 0 and sock.recv(1 << 16):
            pass


def cut_a_frame_short(target: Target) -> None:
    """Leave half a frame, as a worker that dies. Not refused: no peer is there any more."""
    with target.reach() as sock:
        sock.sendall(
            frame(target.shake(sock, NOBODY_EITHER), Header(Op.PUSH, length=1000), bytes(500))
        )
