"""Message authentication codes of payloads."""

from __future__ import annotations

import hashlib
import hmac
import sys

import pytest
from connected_channels import KEY, every_mac, needs_gmac

from shoal.parameter_server.transport.mac import GMAC, HMAC, choose_mac, macs, supported_macs

OWN_KEY = hmac.digest(KEY, b"payload", "sha256")


def tag(kind: int, sequence: int, *pieces: bytes, key: bytes = KEY) -> bytes:
    mac = macs(kind, key)(sequence)
    for piece in pieces:
        mac.update(piece)
    return mac.tag()


@needs_gmac
def test_a_gmac_is_the_tag_of_aes_256_gcm_over_what_is_not_encrypted():
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    for sequence, data in ((0, b"x"), (1, b"header and payload"), (2**40, bytes(100_000))):
        expected = AESGCM(OWN_KEY).encrypt(sequence.to_bytes(12, "little"), b"", data)
        assert tag(GMAC, sequence, data) == expected


def test_an_hmac_is_cut_to_16_bytes():
    assert (
        tag(HMAC, 0, b"header", b"payload")
        == hmac.digest(OWN_KEY, b"headerpayload", hashlib.sha256)[:16]
    )


@every_mac
def test_a_tag_depends_on_all_bytes_and_the_key_not_on_the_chunks(mac):
    whole = tag(mac, 3, b"header", memoryview(b"payload"))
    assert len(whole) == 16
    assert tag(mac, 3, b"headerpay", b"load") == whole
    others = {
        tag(mac, 3, b"headerpayloae"),
        tag(mac, 3, b"headerpayloa"),
        tag(mac, 3, b"headerpayload", key=bytes(32)),
    }
    assert whole not in others
    assert len(others) == 3


@needs_gmac
def test_frames_with_the_same_content_have_different_gmacs():
    assert tag(GMAC, 3, b"same") != tag(GMAC, 4, b"same")


def test_without_the_package_an_end_knows_hmac_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives", None)
    assert supported_macs() == HMAC


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [(HMAC, HMAC, HMAC), (3, 3, GMAC), (3, HMAC, HMAC), (HMAC, 3, HMAC), (3, 0, 0), (128, 128, 0)],
)
def test_the_best_mac_that_both_ends_know_is_chosen(ours, theirs, expected):
    assert choose_mac(ours, theirs) == expected


@needs_gmac
def test_an_old_package_counts_as_none(monkeypatch):
    monkeypatch.delattr("cryptography.hazmat.primitives.ciphers.algorithms.AES256")
    assert supported_macs() == HMAC
