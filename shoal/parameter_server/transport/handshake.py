"""Both ends of a new connection prove that they hold the job's key, without saying it, and agree on
session keys.

    worker                                                server
      │  1 greeting: magic, version, MACs, nonce  ────────▶  │
      │  ◀────────  1 greeting: magic, version, MACs, nonce  │   said at once, to anyone
      │                                                      │   closes, without a word, on what is not a greeting
      │  ◀─────────  2 server's proofs: of the key, the job  │
      │  3 worker's number and proof  ────────────────────▶  │   closes, without a word, on a wrong proof
      │                                                      │
    session keys, one a direction                    session keys, one a direction

A proof is HMAC-SHA256(key, label + both greetings + what it is about). Both nonces are in it, so an
old one is worth nothing; the label differs by role, so one end's own proof sent back to it is worth
nothing either. A server proves
itself first: that tells a stranger nothing about a key of 256 random bits, and lets a worker say
what is wrong. All servers of a job hold one key, so their number belongs in the name of the job,
`digits/2`: else someone in between could lead a worker to another server than it asked for.
Payloads get the best MAC that both ends know (`mac.py`); what an end knows is part of its greeting,
and so of the proofs: nobody in between
can talk the two into a lesser one. Nothing is encrypted: who can listen sees gradients and weights.
docs/security.md argues what is proven and what is not.

Magic and version stay the first six bytes in all versions to come, so that each can tell the other
from itself."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
from dataclasses import dataclass, field

from shoal.errors import ConfigError, ConnectionLost, WireError
from shoal.parameter_server.transport.frame import MAGIC, VERSION
from shoal.parameter_server.transport.key import KEY_BYTES
from shoal.parameter_server.transport.mac import HMAC, choose_mac
from shoal.parameter_server.transport.socket_io import receive_all, send_all

HANDSHAKE_S = 5.0
_GREETING = struct.Struct("<4sHB32s")
_CALLER = struct.Struct("<I")
_PROOF_BYTES = 32


@dataclass(frozen=True)
class Session:
    """The keys of one connection, 32 bytes each, and the MAC of payloads; never printed."""

    send_key: bytes = field(repr=False)
    receive_key: bytes = field(repr=False)
    mac: int = field(default=HMAC, repr=False)


def connect(
    sock: socket.socket,
    key: bytes,
    job: str,
    worker: int,
    limit_s: float = HANDSHAKE_S,
    known: int = HMAC,
) -> Session:
    """The worker's side, over a connected stream socket. Afterwards the socket has no timeout.

    Args: sock: is closed if the handshake fails. key: the job's key, 32 bytes. job: the job's name,
        with the server's number where there are several; the server must give the same. worker:
        this worker's number, below 2**32. limit_s: how long the whole handshake may take. known:
        the MACs that this end knows.

    Raises: WireError: wrong key, another job, another version, not a Shoal server, or closed; the
        message says which.
    """
    talk = _HandshakeIO(sock, time.monotonic() + limit_s, known)
    try:
        ours = talk.send_greeting()
        theirs, agreed = talk.hear_greeting("server")
        if theirs == ours:
            raise WireError(
                "the connection leads back to this end; nobody listens on that port. Start the "
                "server first"
            )
        proofs = _Transcript(key, job, theirs + ours)
        of_key, of_job = talk.receive(_PROOF_BYTES, "server"), talk.receive(_PROOF_BYTES, "server")
        if not hmac.compare_digest(of_key, proofs.key_proof()):
            raise WireError("the server holds another key. Give both the key file of this job")
        if not hmac.compare_digest(of_job, proofs.of_job()):
            raise WireError(
                f"the server serves another job than '{job}'. Connect to the port of this job's "
                "server"
            )
        caller = _CALLER.pack(worker)
        send_all(sock, caller, proofs.of_caller(caller))
        sock.settimeout(None)
        return Session(proofs.client_proof(caller), proofs.server_proof(caller), agreed)
    except BaseException:
        sock.close()
        raise


def accept(
    sock: socket.socket, key: bytes, job: str, limit_s: float = HANDSHAKE_S, known: int = HMAC
) -> tuple[Session, int]:
    """The server's side, over a socket that was just accepted. Afterwards the socket has no
    timeout.

    Args: sock: is closed, without a word, if the handshake fails. key: the job's key, 32 bytes.
        job: as for `connect`. limit_s: how long the whole handshake may take, and thus how long a
        silent peer keeps a thread. known: the MACs that this end knows.

    Returns:
        The session's keys, and the number of the worker at the other end.

    Raises: WireError: the peer does not hold the key, is of another version, no Shoal worker,
        silent or gone.
    """
    talk = _HandshakeIO(sock, time.monotonic() + limit_s, known)
    try:
        ours = talk.send_greeting()
        theirs, agreed = talk.hear_greeting("worker")
        proofs = _Transcript(key, job, ours + theirs)
        send_all(sock, proofs.key_proof(), proofs.of_job())
        caller = talk.receive(_CALLER.size, "worker")
        if not hmac.compare_digest(talk.receive(_PROOF_BYTES, "worker"), proofs.of_caller(caller)):
            raise WireError(
                "the peer's proof is wrong: it does not hold this job's key. It was refused"
            )
        (worker,) = _CALLER.unpack(caller)
        sock.settimeout(None)
        return Session(proofs.server_proof(caller), proofs.client_proof(caller), agreed), worker
    except BaseException:
        sock.close()
        raise


@dataclass(frozen=True)
class _HandshakeIO:
    sock: socket.socket
    deadline_s: float
    supported_macs: int

    def send_greeting(self) -> bytes:
        greeting = _GREETING.pack(MAGIC, VERSION, self.supported_macs, secrets.token_bytes(32))
        self.sock.settimeout(max(self.deadline_s - time.monotonic(), 1e-3))
        send_all(self.sock, greeting)
        return greeting

    def receive(self, size_bytes: int, peer: str) -> bytes:
        heard = bytearray(size_bytes)
        try:
            receive_all(self.sock, memoryview(heard), self.deadline_s)
        except ConnectionLost as error:
            raise ConnectionLost(
                f"no handshake: {error}. The peer is no Shoal {peer}, or it refused this end's "
                "key, job or version: "
                "its log says why"
            ) from error
        return bytes(heard)

    def hear_greeting(self, peer: str) -> tuple[bytes, int]:
        """All of it, and the MAC that follows from it and from this end's."""
        start = self.receive(6, peer)
        magic, version = start[:4], int.from_bytes(start[4:], "little")
        if magic != MAGIC:
            raise WireError(
                f"the peer is no Shoal {peer}: it begins with {magic!r}. Check host and port"
            )
        if version != VERSION:
            raise WireError(
                f"the {peer} speaks version {version} of the wire, this end {VERSION}. Run one "
                "Shoal on both"
            )
        rest = self.receive(_GREETING.size - 6, peer)
        agreed = choose_mac(self.supported_macs, rest[0])
        if not agreed:
            raise WireError(
                f"the {peer} knows no MAC of this end's: its greeting is damaged. The connection "
                "was closed"
            )
        return start + rest, agreed


@dataclass(frozen=True)
class _Transcript:
    key: bytes = field(repr=False)
    job: str
    greetings: bytes  # the server's, then the worker's

    def __post_init__(self) -> None:
        if len(self.key) != KEY_BYTES:
            raise ConfigError(
                [
                    f"the job's key: has {len(self.key)} bytes instead of {KEY_BYTES}; give the "
                    "file the job wrote"
                ]
            )

    def key_proof(self) -> bytes:
        return self._mac(b"server's key")

    def of_job(self) -> bytes:
        return self._mac(b"server's job", self._job())

    def of_caller(self, caller: bytes) -> bytes:
        return self._mac(b"worker", self._job(), caller)

    def client_proof(self, caller: bytes) -> bytes:
        return self._mac(b"to server", self._job(), caller)

    def server_proof(self, caller: bytes) -> bytes:
        return self._mac(b"to worker", self._job(), caller)

    def _job(self) -> bytes:
        return hashlib.sha256(self.job.encode()).digest()

    def _mac(self, label: bytes, *about: bytes) -> bytes:
        # Every field has a fixed size, so no two messages can be written alike.
        return hmac.digest(
            self.key, label.ljust(16, b"\0") + self.greetings + b"".join(about), "sha256"
        )
