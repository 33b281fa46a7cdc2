"""What shows that a payload is the peer's: one of two codes, and which of them the two ends of a
connection use.

    worker  ── greeting: I know GMAC, HMAC ──▶  server     So it is HMAC, the best that both know. The proofs of the
            ◀──── greeting: I know HMAC ──────             handshake hold both greetings: nobody can lower it.

A hash that anyone can compute has to be hard for each byte. A code under a key may be a polynomial,
for which there are
instructions: several times as fast, and as hard to forge as long as no number (nonce) is used
twice.

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
"""Bits of the number in a greeting that says what an end knows; the higher, the better."""


class Mac(Protocol):
    """Of one payload."""

    def update(self, data: ReadableBuffer) -> None:
        """Add bytes."""

    def tag(self) -> bytes:
        """16 bytes, once, after all of it."""


Macs = Callable[[int], Mac]
"""A new one, for the frame with this sequence number; never two for the same, which is the
nonce of a GMAC.
"""


def supported_macs() -> int:
    """What this end knows: HMAC always, GMAC where the package `cryptography` can be used."""
    return HMAC if _ciphers() is None else HMAC | GMAC


def choose_mac(ours: int, theirs: int) -> int:
    """The best that both ends know; 0 if there is none."""
    common = ours & theirs & (HMAC | GMAC)
    return 1 << common.bit_length() >> 1


def macs(kind: int, key: bytes) -> Macs:
    """Codes of a kind for the payloads of one connection and direction, which has this key of
    32 bytes.
    """
    own_key = hmac.digest(key, b"payload", "sha256")  # headers have the key itself
    if kind == HMAC:
        keyed = hmac.new(own_key, digestmod=hashlib.sha256)
        return lambda _: _Hmac(keyed.copy())
    ciphers = _ciphers()
    assert kind == GMAC
    assert ciphers is not None
    block_cipher = ciphers.algorithms.AES256(own_key)

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
        from cryptography.hazmat.primitives.ciphers import algorithms, modes  # noqa: F401 - an attribute of `ciphers`
    except ImportError:
        return None
    return ciphers if hasattr(algorithms, "AES256") else None  # an old one
