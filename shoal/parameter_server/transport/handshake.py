"""The handshake of a new connection: both ends prove that they have the job's key, without sending
it, and derive session keys.

    worker                                                server
      │  1 greeting: magic, version, MACs, nonce  ────────▶  │
      │  ◀────────  1 greeting: magic, version, MACs, nonce  │   sent at once, to anyone
      │                                                      │   closes silently on another greeting
      │  ◀─────────  2 server's proofs: of the key, the job  │
      │  3 worker's number and proof  ────────────────────▶  │   closes silently on a wrong proof
      │                                                      │
    session keys, one a direction                    session keys, one a direction

A proof is HMAC-SHA256(key, label + both greetings + fields). Both nonces are in it, so an old proof
is worthless. The label differs by role, so an end's own proof, sent back to it, is worthless too.
The server proves itself first. That gives a stranger no information about a key of 256 random bits,
and it lets a worker say what is wrong.

All servers of a job have one key. So the name of a job includes the server's number, `digits/2`:
otherwise an attacker in between could lead a worker to another server than it asked for. Payloads
get the best MAC that both ends know (`mac.py`). The list of known MACs is part of the greeting, and
so of the proofs: nobody in between can force a weaker one. Nothing is encrypted: anyone who can
listen sees gradients and weights. docs/security.md argues what is proven and what is not.

Magic and version stay the first six bytes in all versions to come, so that each version can
recognise the others."""

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
    """Take the worker's side, over a connected stream socket. After it, the socket has no timeout.

    Args:
        sock: is closed if the handshake fails.
        key: of the job, 32 bytes.
        job: the job's name, with the listener's name; the server must have the same.
        worker: this worker's number, below 2**32.
        limit_s: for all of the handshake.
        known: the MACs that this end knows.

    Raises:
        WireError: wrong key, another job, another version, not a Shoal server, or closed; the
            message says which.
    """
    io = _HandshakeIO(sock, time.monotonic() + limit_s, known)
    try:
        greeting = io.send_greeting()
        peer_greeting, mac = io.receive_greeting("server")
        if peer_greeting == greeting:
            raise WireError(
                "the connection leads back to this end; nobody listens on that port. Start the "
                "server first"
            )
        proofs = _Transcript(key, job, peer_greeting + greeting)
        key_proof = io.receive(_PROOF_BYTES, "server")
        job_proof = io.receive(_PROOF_BYTES, "server")
        if not hmac.compare_digest(key_proof, proofs.key_proof()):
            raise WireError("the server holds another key. Give both the key file of this job")
        if not hmac.compare_digest(job_proof, proofs.job_proof()):
            raise WireError(
                f"the server serves another job than '{job}'. Connect to the port of this job's "
                "server"
            )
        caller = _CALLER.pack(worker)
        send_all(sock, caller, proofs.caller_proof(caller))
        sock.settimeout(None)
        return Session(proofs.to_server_key(caller), proofs.to_worker_key(caller), mac)
    except BaseException:
        sock.close()
        raise


def accept(
    sock: socket.socket, key: bytes, job: str, limit_s: float = HANDSHAKE_S, known: int = HMAC
) -> tuple[Session, int]:
    """Take the server's side, over an accepted socket. After it, the socket has no timeout.

    Args:
        sock: is closed, without a message, if the handshake fails.
        key: of the job, 32 bytes.
        job: as for `connect`.
        limit_s: for all of the handshake, so for how long a silent peer costs a thread.
        known: the MACs that this end knows.

    Returns:
        The session's keys, and the number of the worker at the other end.

    Raises:
        WireError: the peer does not have the key, is of another version, is no Shoal worker, is
            silent or gone.
    """
    io = _HandshakeIO(sock, time.monotonic() + limit_s, known)
    try:
        greeting = io.send_greeting()
        peer_greeting, mac = io.receive_greeting("worker")
        proofs = _Transcript(key, job, greeting + peer_greeting)
        send_all(sock, proofs.key_proof(), proofs.job_proof())
        caller = io.receive(_CALLER.size, "worker")
        proof = io.receive(_PROOF_BYTES, "worker")
        if not hmac.compare_digest(proof, proofs.caller_proof(caller)):
            raise WireError(
                "the peer's proof is wrong: it does not hold this job's key. It was refused"
            )
        (worker,) = _CALLER.unpack(caller)
        sock.settimeout(None)
        return Session(proofs.to_worker_key(caller), proofs.to_server_key(caller), mac), worker
    except BaseException:
        sock.close()
        raise


@dataclass(frozen=True)
class _HandshakeIO:
    """Sends and receives the messages of one handshake, before its deadline."""

    sock: socket.socket
    deadline_s: float
    supported_macs: int

    def send_greeting(self) -> bytes:
        greeting = _GREETING.pack(MAGIC, VERSION, self.supported_macs, secrets.token_bytes(32))
        self.sock.settimeout(max(self.deadline_s - time.monotonic(), 1e-3))
        send_all(self.sock, greeting)
        return greeting

    def receive(self, size_bytes: int, peer: str) -> bytes:
        message = bytearray(size_bytes)
        try:
            receive_all(self.sock, memoryview(message), self.deadline_s)
        except ConnectionLost as error:
            raise ConnectionLost(
                f"no handshake: {error}. The peer is no Shoal {peer}, or it refused this end's "
                "key, job or version: "
                "its log says why"
            ) from error
        return bytes(message)

    def receive_greeting(self, peer: str) -> tuple[bytes, int]:
        """Return the peer's greeting, and the MAC that both ends choose."""
        # The first six bytes alone, because a peer of another version may send another length.
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
        mac = choose_mac(self.supported_macs, rest[0])
        if not mac:
            raise WireError(
                f"the {peer} knows no MAC of this end's: its greeting is damaged. The connection "
                "was closed"
            )
        return start + rest, mac


@dataclass(frozen=True)
class _Transcript:
    """Proofs and session keys that follow from a job's key and one handshake.

    Attributes:
        greetings: the server's, then the worker's.
    """

    key: bytes = field(repr=False)
    job: str
    greetings: bytes

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

    def job_proof(self) -> bytes:
        return self._mac(b"server's job", self._job_hash())

    def caller_proof(self, caller: bytes) -> bytes:
        return self._mac(b"worker", self._job_hash(), caller)

    def to_server_key(self, caller: bytes) -> bytes:
        return self._mac(b"to server", self._job_hash(), caller)

    def to_worker_key(self, caller: bytes) -> bytes:
        return self._mac(b"to worker", self._job_hash(), caller)

    def _job_hash(self) -> bytes:
        return hashlib.sha256(self.job.encode()).digest()

    def _mac(self, label: bytes, *fields: bytes) -> bytes:
        # Every field has a fixed size, so two different messages never have the same bytes.
        message = label.ljust(16, b"\0") + self.greetings + b"".join(fields)
        return hmac.digest(self.key, message, "sha256")
