"""Handshakes over real sockets: of honest peers and of attackers."""

from __future__ import annotations

import contextlib
import random
import socket
import time

import pytest
from connected_channels import KEY, KINDS, beside, read_to_end, sockets

from shoal.errors import ConfigError, ConnectionLost, WireError
from shoal.parameter_server.transport.frame import MAGIC, VERSION
from shoal.parameter_server.transport.handshake import accept, connect
from shoal.parameter_server.transport.mac import GMAC, HMAC

GREETING_BYTES = 39
CALLER_BYTES = 4
PROOFS_BYTES = 64
MACS_AT = 6
OTHER_VERSION = (VERSION + 1).to_bytes(2, "little")


def shake(
    worker_end, server_end, worker_key=KEY, worker_job="digits", worker=7, known=(HMAC, HMAC)
):
    """Make a handshake; return the result of each side, or its error."""
    with beside(accept, server_end, KEY, "digits", known=known[1]) as accepting:
        try:
            connected = connect(worker_end, worker_key, worker_job, worker, known=known[0])
        except WireError as error:
            connected = error
    return connected, accepting.exception() or accepting.result()


def relayed(
    source: socket.socket, sink: socket.socket, flip_at: int | None = None, flip: int = 1
) -> bytes:
    """Forward bytes, with bits of byte `flip_at` turned; return the bytes as they came."""
    passed = b""
    with contextlib.suppress(OSError):  # an end that refuses closes what it has not read
        while piece := source.recv(1 << 12):
            altered = bytearray(piece)
            if flip_at is not None and len(passed) <= flip_at < len(passed) + len(piece):
                altered[flip_at - len(passed)] ^= flip
            passed += piece
            sink.sendall(altered)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
    return passed


def through_a_third(flip_to_server=None, flip_to_worker=None, flip=1, known=(HMAC, HMAC)):
    """A handshake through a man in the middle; what either side ends with, and what went to the
    server.
    """
    with (
        sockets() as (worker_end, left),
        sockets() as (right, server_end),
        beside(relayed, left, right, flip_to_server, flip) as heard,
        beside(relayed, right, left, flip_to_worker, flip),
    ):
        connected, accepted = shake(worker_end, server_end, known=known)
        worker_end.close()
        server_end.close()
    return connected, accepted, heard.result()


@pytest.mark.parametrize("kind", KINDS)
def test_both_ends_agree_on_one_key_a_direction(kind):
    with sockets(kind) as (worker_end, server_end):
        mine, (theirs, worker) = shake(worker_end, server_end, worker=2**32 - 1)
        assert worker == 2**32 - 1
        assert mine.send_key == theirs.receive_key != mine.receive_key == theirs.send_key
        assert len(mine.send_key) == len(mine.receive_key) == 32
        assert worker_end.gettimeout() is server_end.gettimeout() is None
    with sockets(kind) as (worker_end, server_end):
        again, _ = shake(worker_end, server_end)
        assert len({mine.send_key, mine.receive_key, again.send_key, again.receive_key, KEY}) == 5


def test_keys_are_not_printed():
    with sockets() as (worker_end, server_end):
        session, _ = shake(worker_end, server_end)
    assert repr(session) == "Session()"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"worker_key": bytes(32)}, "holds another key. Give both"),
        ({"worker_job": "other"}, "serves another job than 'other'. Connect"),
    ],
)
def test_a_worker_with_a_wrong_key_or_job_gets_the_reason_from_its_own_end(kind, wrong, why):
    with sockets(kind) as (worker_end, server_end):
        connected, accepted = shake(worker_end, server_end, **wrong)
        assert why in str(connected)
        assert isinstance(accepted, WireError)
        assert worker_end.fileno() == server_end.fileno() == -1


def test_a_stranger_receives_a_greeting_and_two_proofs_and_nothing_more():
    with (
        sockets() as (stranger, server_end),
        beside(accept, server_end, KEY, "digits") as accepting,
    ):
        stranger.sendall(
            MAGIC
            + VERSION.to_bytes(2, "little")
            + bytes([HMAC])
            + bytes(32)
            + bytes(CALLER_BYTES + 32)
        )
        assert len(read_to_end(stranger)) == GREETING_BYTES + PROOFS_BYTES
    assert "does not hold this job's key" in str(accepting.exception())


@pytest.mark.parametrize(
    ("greeting", "why"),
    [
        (
            MAGIC + OTHER_VERSION + bytes(32),
            f"speaks version {VERSION + 1} of the wire, this end {VERSION}",
        ),
        (b"GET / HTTP/1.1\r\n\r\n", "begins with b'GET '. Check host and port"),
        (b"", "closed the connection after 0 of 6 bytes"),
        (MAGIC, "closed the connection after 4 of 6 bytes"),
        (
            MAGIC + VERSION.to_bytes(2, "little") + bytes(32),
            "closed the connection after 32 of 33 bytes",
        ),
        (MAGIC + VERSION.to_bytes(2, "little") + bytes(33), "knows no MAC of this end's"),
    ],
)
def test_another_greeting_is_refused_by_either_side(greeting, why):
    for side in (
        lambda sock: accept(sock, KEY, "digits"),
        lambda sock: connect(sock, KEY, "digits", 0),
    ):
        with sockets("tcp") as (ours, stranger):
            stranger.sendall(greeting)
            stranger.shutdown(socket.SHUT_WR)
            with pytest.raises(WireError) as caught:
                side(ours)
            assert why in str(caught.value)
            assert len(read_to_end(stranger)) == GREETING_BYTES


def test_a_worker_connected_to_itself_reports_that_nobody_listens():
    with (
        sockets() as (worker_end, echo),
        beside(relayed, echo, echo),
        pytest.raises(WireError, match="back to this"),
    ):
        connect(worker_end, KEY, "digits", 0)


def test_a_servers_own_messages_sent_back_are_refused():
    with (
        sockets() as (echo, server_end),
        beside(relayed, echo, echo),
        pytest.raises(WireError, match="does not hold"),
    ):
        accept(server_end, KEY, "digits")


def test_a_workers_messages_of_an_earlier_connection_are_refused():
    connected, (_, worker), heard = through_a_third()
    assert not isinstance(connected, WireError)
    assert worker == 7
    with sockets() as (thief, server_end):
        thief.sendall(heard)
        with pytest.raises(WireError, match="does not hold"):
            accept(server_end, KEY, "digits")


BOTH = HMAC | GMAC


@pytest.mark.parametrize(
    ("known", "agreed"),
    [
        ((BOTH, BOTH), GMAC),
        ((BOTH, HMAC), HMAC),
        ((HMAC, BOTH), HMAC),
        ((BOTH | 64, BOTH | 128), GMAC),
    ],
)
def test_both_ends_take_the_best_mac_that_both_know(known, agreed):
    with sockets() as (worker_end, server_end):
        mine, (theirs, _) = shake(worker_end, server_end, known=known)
        assert mine.mac == theirs.mac == agreed


@pytest.mark.parametrize("direction", ["flip_to_server", "flip_to_worker"])
def test_an_attacker_in_between_can_neither_remove_nor_add_a_mac(direction):
    for known in ((BOTH, BOTH), (HMAC, BOTH), (BOTH, HMAC)):
        connected, accepted, _ = through_a_third(**{direction: MACS_AT}, flip=GMAC, known=known)
        assert isinstance(connected, WireError)
        assert isinstance(accepted, WireError)


def test_no_bit_can_be_turned_on_the_way():
    for flip_at in range(GREETING_BYTES + CALLER_BYTES + 32):
        _, accepted, heard = through_a_third(flip_to_server=flip_at)
        assert isinstance(accepted, WireError), flip_at
        assert len(heard) in (GREETING_BYTES, GREETING_BYTES + CALLER_BYTES + 32)
    for flip_at in range(GREETING_BYTES + PROOFS_BYTES):
        connected, accepted, _ = through_a_third(flip_to_worker=flip_at)
        assert isinstance(connected, WireError), flip_at
        assert isinstance(accepted, WireError), flip_at


def test_random_bytes_are_refused_200_times():
    generator = random.Random(20)
    greeting = MAGIC + VERSION.to_bytes(2, "little")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for trial in range(200):
            with socket.create_connection(listener.getsockname()) as stranger:
                server_end, _ = listener.accept()
                stranger.sendall(
                    greeting * (trial % 2) + generator.randbytes(generator.randrange(300))
                )
                stranger.shutdown(socket.SHUT_WR)
                with pytest.raises(WireError):
                    accept(server_end, KEY, "digits")
                assert server_end.fileno() == -1


def test_a_silent_peer_is_refused_after_the_limit():
    with (
        sockets("tcp") as (_silent, server_end),
        pytest.raises(ConnectionLost, match="silent or too slow: 0 of 6 bytes"),
    ):
        accept(server_end, KEY, "digits", limit_s=0.05)
    with (
        sockets("tcp") as (worker_end, _silent),
        pytest.raises(ConnectionLost, match="silent or too slow: 0 of 6 bytes"),
    ):
        connect(worker_end, KEY, "digits", 0, limit_s=0.05)


def test_a_peer_that_sends_its_greeting_slowly_is_refused_too():
    def drip(sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock.sendall(MAGIC[:1])
                time.sleep(0.02)

    with sockets() as (stranger, server_end):
        stranger.sendall(MAGIC + VERSION.to_bytes(2, "little"))
        with beside(drip, stranger), pytest.raises(ConnectionLost, match="too slow"):
            accept(server_end, KEY, "digits", limit_s=0.1)


def test_a_key_of_another_length_never_opens_a_session():
    with sockets() as (ours, theirs):
        theirs.sendall(MAGIC + VERSION.to_bytes(2, "little") + bytes([HMAC]) + bytes(32))
        with pytest.raises(ConfigError, match="has 0 bytes instead of 32"):
            accept(ours, b"", "digits")
