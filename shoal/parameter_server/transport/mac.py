"""Message authentication codes of payloads: one of two, and the choice between them.

    worker  ── greeting: I know GMAC, HMAC ──▶  server     So both use HMAC, the best in common.
            ◀──── greeting: I know HMAC ──────             The handshake's proofs cover both
                                                           greetings, so nobody can weaken it.

HMAC uses a hash that anyone can compute, so the hash must be expensive for each byte. A code under
a secret key may be a polynomial, for which CPUs have instructions. It is several times as fast, and
as hard to forge as long as no number (nonce) is used twice.

Sources: HMAC, RFC 2104. GMAC, NIST SP 800-38D: the tag of AES-256-GCM over bytes that are not
encrypted."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

MAC_BYTES = 16
HMAC, GMAC = 1, 2
"""Bits of the list of known MACs in a greeting; the higher bit is the better MAC."""


class Mac(Protocol):
    """Authentication code of one payload."""

    def update(self, data: ReadableBuffer) -> None:
        """Add bytes of the payload."""

    def tag(self) -> bytes:
        """Return the 16 bytes of the code. Call it once, after all updates."""


Macs = Callable[[int], Mac]
"""Function that starts the MAC of the frame with a sequence number.

The number is the nonce of a GMAC, so it must never be used for two payloads.
"""


def supported_macs() -> int:
    """Return the MACs that this end knows: HMAC, and GMAC if `cryptography` is installed."""
    return HMAC if _ciphers() is None else HMAC | GMAC


def choose_mac(known: int, known_to_peer: int) -> int:
    """Return the best MAC that both ends know; 0 if there is none."""
    common = known & known_to_peer & (HMAC | GMAC)
    return 1 << common.bit_length() >> 1


def macs(kind: int, key: bytes) -> Macs:
    """Return the MACs of the payloads of one connection and direction.

    Args:
        kind: HMAC or GMAC.
        key: of the session and direction, 32 bytes.
    """
    # Headers are authenticated with `key` itself, so payloads must have another one.
    payload_key = hmac.digest(key, b"payload", "sha256")
    if kind == HMAC:
        keyed = hmac.new(payload_key, digestmod=hashlib.sha256)
        return lambda _: _Hmac(keyed.copy())
    ciphers = _ciphers()
    assert kind == GMAC
    assert ciphers is not None
    block_cipher = ciphers.algorithms.AES256(payload_key)

    def gmac(sequence: int) -> Mac:
        nonce = ciphers.modes.GCM(sequence.to_bytes(12, "little"))
        return _Gmac(ciphers.Cipher(block_cipher, nonce).encryptor())

    return gmac


class _Hmac:
    def __init__(self, keyed: hmac.HMAC) -> None:
        self._keyed = keyed

    def update(self, data: ReadableBuffer) -> None:
        self._keyed.update(data)

    def tag(self) -> bytes:
        return self._keyed.digest()[:MAC_BYTES]


class _Gmac:
    def __init__(self, encryptor: Any) -> None:
        self._encryptor = encryptor

    def update(self, data: ReadableBuffer) -> None:
        self._encryptor.authenticate_additional_data(data)

    def tag(self) -> bytes:
        self._encryptor.finalize()
        return bytes(self._encryptor.tag)


def _ciphers() -> Any:
    try:
        from cryptography.hazmat.primitives import ciphers

        # The second import makes `algorithms` and `modes` attributes of `ciphers`.
        from cryptography.hazmat.primitives.ciphers import algorithms, modes  # noqa: F401
    except ImportError:
        return None
    return ciphers if hasattr(algorithms, "AES256") else None  # old versions lack it
