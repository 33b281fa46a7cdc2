"""Frames that a peer or an attacker may send instead of the next one: each ends in an error."""

from __future__ import annotations

import contextlib
import errno
import random
import signal
import socket
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
from connected_channels import (
    MIB,
    PEERS,
    SESSION,
    beside,
    every_mac,
    frames,
    needs_gmac,
    new_memory,
    read_to_end,
    sockets,
)

from shoal.errors import ConnectionLost, WireError
from shoal.parameter_server.transport.frame import Header
from shoal.parameter_server.transport.handshake import Session
from shoal.parameter_server.transport.mac import GMAC, HMAC
from shoal.parameter_server.transport.secure_channel import SecureChannel

HEAD_BYTES = 44 + 16
PUSH = (Header(op=1, step=1), b"first")
NEXT = (Header(op=1, step=2), b"second")


def received(
    sent: bytes,
    count: int,
    authenticate: bool = True,
    limit_bytes: int = 1000,
    place=new_memory,
    mac=HMAC,
):
    """Receive `count` frames from a peer that sends these bytes and closes."""
    with sockets("tcp") as (first, second):
        second.sendall(sent)
        second.close()
        session = replace(SESSION, mac=mac)
        channel = SecureChannel(
            first, session, authenticate_payload=authenticate, limit_bytes=limit_bytes
        )
        with contextlib.closing(channel):
            return [bytes(channel.receive(place)[1]) for _ in range(count)]


def test_recorded_frames_are_what_the_other_end_receives():
    assert received(b"".join(frames(PUSH, NEXT)), 2) == [b"first", b"second"]


def test_a_replayed_frame_is_refused():
    first, _ = frames(PUSH, NEXT)
    with pytest.raises(WireError, match="frame 0 came in place of frame 1: repeated"):
        received(first + first, 2)


def test_frames_out_of_turn_are_refused():
    first, second = frames(PUSH, NEXT)
    with pytest.raises(WireError, match="frame 1 came in place of frame 0"):
        received(second + first, 1)


def test_a_frame_that_was_left_out_is_noticed():
    first, _, third = frames(PUSH, NEXT, PUSH)
    with pytest.raises(WireError, match="frame 2 came in place of frame 1: repeated, lost"):
        received(first + third, 2)


class FailsOnce(socket.socket):
    """A socket without memory for its first message."""

    failures = 1

    def sendmsg(self, *arguments: Any) -> int:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.ENOBUFS, "No buffer space available")
        return super().sendmsg(*arguments)


@every_mac
def test_a_number_is_never_used_for_two_payloads(mac):
    with sockets() as (first, second), FailsOnce(fileno=first.detach()) as failing:
        channel = SecureChannel(
            failing, replace(SESSION, mac=mac), authenticate_payload=True, limit_bytes=1000
        )
        for _ in range(2):
            with pytest.raises(ConnectionLost):
                channel.send(*PUSH)
        assert second.recv(1) == b""


@pytest.mark.parametrize("session", [SESSION, Session(send_key=bytes(32), receive_key=bytes(32))])
def test_ones_own_frames_and_those_of_another_session_are_refused(session):
    with pytest.raises(WireError, match="damaged or not the peer's"):
        received(frames(PUSH, session=session)[0], 1)


def test_an_oversized_frame_is_refused_before_any_memory_is_taken():
    def place(_header: Header) -> None:
        raise AssertionError

    (oversized,) = frames((Header(op=1), bytes(1001)))
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match="has 1001 bytes of payload; the limit is 1000"):
            received(oversized, 1, place=place)
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


@every_mac
def test_a_turned_bit_anywhere_is_refused(mac):
    (frame,) = frames(PUSH, session=replace(PEERS, mac=mac))
    for position in range(len(frame)):
        damaged = bytearray(frame)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(
            WireError, match="header is damaged" if position < HEAD_BYTES else "payload is damaged"
        ):
            received(bytes(damaged), 1, mac=mac)


@every_mac
def test_a_payload_under_the_header_of_another_frame_is_refused(mac):
    first, second = frames(
        (Header(op=1), b"first"), (Header(op=1), b"other"), session=replace(PEERS, mac=mac)
    )
    with pytest.raises(WireError, match="payload is damaged"):
        received(first[:HEAD_BYTES] + second[HEAD_BYTES:], 1, mac=mac)


@needs_gmac
def test_ends_that_differ_in_the_mac_refuse_each_other():
    for ours, theirs in ((HMAC, GMAC), (GMAC, HMAC)):
        (frame,) = frames(PUSH, session=replace(PEERS, mac=theirs))
        with pytest.raises(WireError, match="payload is damaged"):
            received(frame, 1, mac=ours)


def test_without_payload_authentication_the_header_still_has_its_mac():
    (frame,) = frames(PUSH, authenticate=False)
    assert len(frame) == HEAD_BYTES + len(PUSH[1])
    for position in range(HEAD_BYTES):
        damaged = bytearray(frame)
        damaged[position] ^= 128
        with pytest.raises(WireError, match="header is damaged"):
            received(bytes(damaged), 1, authenticate=False)


@pytest.mark.parametrize("authenticate", [True, False])
def test_a_frame_cut_off_anywhere_is_a_lost_connection(authenticate):
    first, second = frames(PUSH, NEXT, authenticate=authenticate)
    for length in range(len(second)):
        with pytest.raises(ConnectionLost, match=r"after \d+ of \d+ bytes"):
            received(first + second[:length], 2, authenticate)


def test_random_bytes_are_refused_200_times():
    generator = random.Random(44)
    (frame,) = frames(PUSH)
    for trial in range(200):
        prefix = frame if trial % 2 else b""
        with pytest.raises(WireError):
            received(prefix + generator.randbytes(generator.randrange(400)), 2)


def test_after_a_refused_frame_both_ends_are_closed():
    with sockets("tcp") as (first, second):
        channel = SecureChannel(first, SESSION, authenticate_payload=True, limit_bytes=1000)
        second.sendall(bytes(HEAD_BYTES))
        with pytest.raises(WireError, match="header is damaged"):
            channel.receive(new_memory)
        assert read_to_end(second) == b""
        assert first.fileno() == -1
        with pytest.raises(ConnectionLost):
            channel.send(Header(op=1))


def test_a_payload_of_another_length_is_refused_and_writes_nothing():
    place = bytearray(4)
    with pytest.raises(WireError, match="sent 5 bytes for a place of 4"):
        received(frames(PUSH)[0], 1, place=lambda _header: place)
    assert place == bytes(4)


def test_an_error_of_place_closes_the_channel_and_goes_to_the_caller():
    def place(header: Header) -> None:
        raise LookupError(header.step)

    with pytest.raises(LookupError, match="1"):
        received(frames(PUSH)[0], 1, place=place)


def test_a_peer_killed_in_the_middle_of_a_frame_is_a_lost_connection():
    (frame,) = frames((Header(op=1), bytes(1000)))
    program = (
        "import socket, sys, time; s = socket.socket(fileno=int(sys.argv[1])); "
        "s.sendall(bytes.fromhex(sys.argv[2]))"
    )
    with sockets("tcp") as (first, second):
        handle = second.fileno()
        peer = subprocess.Popen(
            [
                sys.executable,
                "-S",
                "-c",
                f"{program}; time.sleep(600)",
                str(handle),
                frame[:500].hex(),
            ],
            pass_fds=[handle],
        )
        second.close()
        channel = SecureChannel(first, SESSION, authenticate_payload=True, limit_bytes=1000)
        with beside(channel.receive, lambda _header: peer.send_signal(signal.SIGKILL)) as receiving:
            assert isinstance(receiving.exception(), ConnectionLost)
        assert peer.wait() == -signal.SIGKILL


def test_ends_that_differ_in_authentication_refuse_each_other():
    first, second = frames(PUSH, NEXT, session=PEERS, authenticate=False)
    with pytest.raises(WireError):
        received(first + second, 2, authenticate=True)
    first, second = frames(PUSH, NEXT, session=PEERS, authenticate=True)
    with pytest.raises(WireError):
        received(first + second, 2, authenticate=False)
