"""docs/security.md says what goes over a server's connection; here it is computed by hand."""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct

import pytest
from connected_channels import KEY, beside, channels, frames, sockets

from shoal.errors import WireError
from shoal.parameter_server.transport.frame import MAGIC, VERSION, Header
from shoal.parameter_server.transport.handshake import accept
from shoal.parameter_server.transport.mac import HMAC

GREETING_BYTES = 39


def receive(sock: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        found += sock.recv(count - len(found))
    return found


def value(label: bytes, *fields: bytes) -> bytes:
    """Return H of the page: a label of 16 bytes, then fields of a fixed size."""
    return hmac.new(KEY, label + bytes(16 - len(label)) + b"".join(fields), hashlib.sha256).digest()


def greet(sock: socket.socket, nonce: bytes) -> tuple[bytes, bytes]:
    """Return the greetings of server and worker."""
    worker = MAGIC + struct.pack("<HB", VERSION, HMAC) + nonce
    sock.sendall(worker)
    return receive(sock, GREETING_BYTES), worker


def test_the_five_values_of_a_handshake_are_those_of_the_page():
    job, number = hashlib.sha256(b"digits/2").digest(), struct.pack("<I", 7)
    with sockets() as (worker_end, server_end):
        with beside(accept, server_end, KEY, "digits/2") as accepting:
            server, worker = greet(worker_end, bytes(range(32)))
            both = server + worker
            assert receive(worker_end, 32) == value(b"server's key", both)
            assert receive(worker_end, 32) == value(b"server's job", both, job)
            worker_end.sendall(number + value(b"worker", both, job, number))
            session, accepted = accepting.result()
        assert accepted == 7
        assert session.receive_key == value(b"to server", both, job, number)
        assert session.send_key == value(b"to worker", both, job, number)
        worker_end.setblocking(False)
        with pytest.raises(BlockingIOError):  # the worker is not told that it was accepted
            worker_end.recv(1)


def test_a_greeting_has_a_fresh_nonce_of_32_bytes():
    nonces = set()
    for _ in range(3):
        with sockets() as (worker_end, server_end), beside(accept, server_end, KEY, "x") as end:
            server, _ = greet(worker_end, bytes(32))
            worker_end.close()
            assert isinstance(end.exception(), WireError)
        assert server[:4] == MAGIC
        nonces.add(server[-32:])
    assert len(nonces) == 3


def test_the_number_of_a_worker_is_proven_and_its_proof_counts_in_one_order_of_greetings():
    job, number = hashlib.sha256(b"digits").digest(), struct.pack("<I", 7)
    for first, told in ((0, struct.pack("<I", 8)), (1, number)):
        with (
            sockets() as (worker_end, server_end),
            beside(accept, server_end, KEY, "digits") as end,
        ):
            pair = greet(worker_end, bytes(32))
            both = pair[first] + pair[1 - first]
            worker_end.sendall(told + value(b"worker", both, job, number))
            assert "proof is wrong" in str(end.exception())


def test_a_frame_is_a_header_its_tag_a_payload_and_its_tag():
    key = b"b" * 32  # of the direction; see `frames`
    for number, sent in enumerate(frames((Header(op=1), b"payload"), (Header(op=2), b"more"))):
        header, tag, rest = sent[:44], sent[44:60], sent[60:]
        payload, payload_tag = rest[:-16], rest[-16:]
        assert struct.unpack("<QQ", header[28:]) == (len(payload), number)
        assert tag == hmac.digest(key, header, "sha256")[:16]
        of_payloads = hmac.digest(key, b"payload", "sha256")
        assert payload_tag == hmac.digest(of_payloads, header + payload, "sha256")[:16]


def test_a_frame_whose_payload_has_a_tag_is_never_begun():
    with channels() as (ours, theirs):
        assert not ours.try_send(Header(op=1), b"payload")
        ours.send(Header(op=2))
        assert theirs.receive(lambda _: None)[0].op == 2  # nothing came before it
