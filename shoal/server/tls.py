"""Encryption between machines, where a job has a certificate: TLS 1.3, with the same certificate at both ends.

    who speaks ──> [socket pair] ── a thread ── TLS ──> network ── TLS ── a thread ──> [socket pair] ──> who hears

OpenSSL does not let two threads read and write one connection at once, and here a thread of each does. So one thread
owns the connection, and everyone else has the other end of a socket pair, which behaves as the connection would.
The certificate is the job's own, signed by itself; a peer is let on only if it shows that one. Who it is, and
that nobody has changed the order of frames, is still a matter of the key: see `shoal.server.handshake`.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
from pathlib import Path

from shoal.errors import ConfigError, ConnectionLost
from shoal.server.stream import tune

MAKE_ONE = (
    "openssl req -x509 -newkey rsa:3072 -nodes -days 365 -subj /CN=shoal -keyout job.pem -out crt.pem && "
    "cat crt.pem >> job.pem && chmod 600 job.pem"
)
_CHUNK_BYTES = 256 * 1024
_WANTS = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


def refuse_bad(path: Path) -> None:
    """Raise ConfigError where `path` holds no private key and certificate for TLS, or others can read it."""
    try:
        mode = path.stat().st_mode
        _context(path, server_side=True)
    except (OSError, ssl.SSLError) as error:
        problem = getattr(error, "strerror", None) or str(error)
        raise ConfigError([f"tls={path}: no key and certificate in PEM ({problem}). Make one: {MAKE_ONE}"]) from None
    if mode & 0o077:
        raise ConfigError([f"tls={path}: others can open it (mode {mode & 0o7777:04o}). Run: chmod 600 {path}"])


def secured(sock: socket.socket, certificate: Path, *, server_side: bool, limit_s: float) -> socket.socket:
    """A socket through which all that is said goes out encrypted over `sock`, which belongs to it from now on.

    Args:
        sock: connected; is closed if the handshake fails.
        certificate: PEM file of a private key and the certificate that both ends show.
        limit_s: how long TLS's handshake may take.

    Raises: ConnectionLost: the peer shows another certificate, or none, or is silent.
    """
    try:
        tune(sock)
        sock.settimeout(limit_s)
        wire = _context(certificate, server_side).wrap_socket(sock, server_side=server_side)
        if not server_side:  # under TLS 1.3 it hears only now whether the server has taken its certificate
            _hear(wire)
        else:
            wire.sendall(_WELCOME)
    except (OSError, ssl.SSLError) as error:
        sock.close()
        raise ConnectionLost(
            f"no TLS with the peer ({getattr(error, 'reason', None) or error}). Give all processes the certificate of "
            "this job, tls=FILE, and look at the peer's log"
        ) from error
    wire.setblocking(False)
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    threading.Thread(target=_carry, args=(theirs, wire), name="tls", daemon=True).start()
    return ours


_WELCOME = b"\n"


def _hear(wire: ssl.SSLSocket) -> None:
    if wire.recv(1) != _WELCOME:
        raise ConnectionResetError("it has hung up")


def _context(certificate: Path, server_side: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # it is the certificate that counts, wherever a process runs
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(certificate)
    context.load_verify_locations(certificate)
    return context


class _Way:
    """What is on its way in one direction: read from one end, not yet taken by the other."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source, self.sink = source, sink
        self.left = memoryview(b"")
        self.is_open = True

    def move(self) -> bool:
        """Move what can be moved; whether there was anything."""
        moved = False
        with contextlib.suppress(*_WANTS, BlockingIOError):
            if not self.left and self.is_open:
                self.left = memoryview(self.source.recv(_CHUNK_BYTES))
                moved, self.is_open = True, bool(self.left)
            if self.left:
                self.left = self.left[self.sink.send(self.left) :]
                moved = True
        return moved


def _carry(plain: socket.socket, wire: ssl.SSLSocket) -> None:
    """Until either end hangs up."""
    out, back = _Way(plain, wire), _Way(wire, plain)
    with plain, wire, contextlib.suppress(OSError):  # the end of one is the end of the other
        while out.is_open and back.is_open:
            if not (out.move() | back.move()):
                _wait(plain, wire, out, back)
        for way in (out, back):
            _drain(way)


def _wait(plain: socket.socket, wire: ssl.SSLSocket, out: _Way, back: _Way) -> None:
    """Until something can be moved."""
    poll = select.poll()
    poll.register(wire, (0 if back.left else select.POLLIN) | (select.POLLOUT if out.left else 0))
    poll.register(plain, (0 if out.left else select.POLLIN) | (select.POLLOUT if back.left else 0))
    poll.poll()


def _drain(way: _Way) -> None:
    """What was read before the end still arrives."""
    way.sink.settimeout(5)
    if way.left:
        way.sink.sendall(way.left)
