"""The key of a job, 256 random bits, and the certificate that follows from it. A process with the
key may push and pull.

    launcher ── new_key_file ──▶ server.key (0600) ── read_key ──▶ servers and workers
    secret of a job on several hosts ── derived_key ──▶ servers and workers of each host
                                                          │
                        Ed25519 private key, self-signed certificate: the same bytes on each host

The key is never in argv, in a log or in an error's text.
"""

from __future__ import annotations

import datetime
import functools
import hmac
import os
import secrets
import ssl
import stat
from dataclasses import dataclass, field
from pathlib import Path

from shoal.errors import ConfigError
from shoal.platform.ownership import open_own

KEY_BYTES = 32
KEY_FILE = "server.key"
MISSING_PACKAGE = (
    "the servers' connections between machines are encrypted by TLS, and the package that makes "
    'its certificate is missing: pip install "shoal[tls]", on every host. In a network that you '
    "trust, encrypt=false needs none"
)


@dataclass(frozen=True)
class Key:
    """Proof that a process belongs to a job.

    Attributes:
        secret: 32 bytes; never printed.
    """

    secret: bytes = field(repr=False)


def derived_key(secret: bytes, job: str) -> Key:
    """Return the key of one job of servers, by HMAC-SHA256 of its name.

    Args: secret: that all ranks of a launch have; a launch may start servers several times.
    """
    return Key(hmac.digest(secret, f"servers of {job}".encode(), "sha256"))


def new_key_file(directory: Path, key: Key | None = None) -> Path:
    """Write a key to `directory`/server.key, readable by its owner only.

    Args: key: None for a new one.

    Raises:
        OSError: there is a key already, or it cannot be written.
    """
    path = directory / KEY_FILE
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb", buffering=0) as file:
        file.write(secrets.token_bytes(KEY_BYTES) if key is None else key.secret)
    return path


def read_key(path: Path) -> Key:
    """Read the key of 32 bytes in `path`.

    Raises:
        ConfigError: there is no such file, others can read it, another user owns it, or it does
            not have 32 bytes.
    """
    try:
        with open(open_own(path, os.O_RDONLY), "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            secret = file.read(KEY_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot read the key ({error.strerror}); give the file that the job wrote"
        ) from None
    if mode & 0o077:
        problem = f"others can open it (mode {mode:04o}), so the key is no secret"
    elif len(secret) != KEY_BYTES:
        problem = f"it does not hold the {KEY_BYTES} bytes of a key"
    else:
        return Key(secret)
    raise ConfigError(f"{path}: {problem}; delete it and let the job write a new one")


def can_encrypt() -> bool:
    """Return whether the package that makes certificates is installed."""
    try:
        import cryptography  # noqa: F401
    except ImportError:
        return False
    return True


@functools.lru_cache(maxsize=4)
def tls_context(key: Key, server_side: bool) -> ssl.SSLContext:
    """Return the settings of TLS 1.3 for one end of the connections of a job.

    Both ends present the job's certificate and accept this one alone: it is the only authority.

    Raises:
        ConfigError: the package `cryptography` is not installed.
    """
    certificate, private_key = _certificate(key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The key is the identity: whoever has it may be at any address.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate.decode())
    if server_side:
        context.num_tickets = 0  # nothing is resumed
    # `ssl` reads private keys from files alone: this one has no name in any directory.
    with open(os.memfd_create("shoal-certificate"), "wb", buffering=0) as memory:
        memory.write(certificate + private_key)
        context.load_cert_chain(f"/proc/self/fd/{memory.fileno()}")
    return context


def _certificate(key: Key) -> tuple[bytes, bytes]:
    """Return the certificate of a job and its private key, as PEM.

    Both follow from the key, so that no host has to send them to another: an Ed25519 private key is
    any 32 bytes, its signatures have no random part, and the dates are fixed.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError as error:
        raise ConfigError(MISSING_PACKAGE) from error
    private_key = Ed25519PrivateKey.from_private_bytes(key.secret)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "servers of a Shoal job")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private_key.public_key())
        .serial_number(1)
        .not_valid_before(datetime.datetime(2000, 1, 1))
        .not_valid_after(datetime.datetime(9999, 12, 31))  # it ends with the job: RFC 5280, 4.1.2.5
        .sign(private_key, None)
    )
    pem = serialization.Encoding.PEM
    pkcs8, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return certificate.public_bytes(pem), private_key.private_bytes(pem, pkcs8, plain)
