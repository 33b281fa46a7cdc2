"""Frames between two ends: their order, where they go, and frames that no honest end sends."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import struct
import subprocess
import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from connected_channels import (
    KINDS,
    MIB,
    beside,
    connections,
    new_memory,
    read_to_end,
    send,
    sockets,
)

from shoal.errors import ConnectionLost, WireError
from shoal.parameter_server.codec import Op
from shoal.parameter_server.transport.connection import (
    HEADER_BYTES,
    INLINE_SEND_BYTES,
    Connection,
    Header,
    pack,
    unpack,
)
from shoal.parameter_server.transport.stream import Stream


def test_values_go_out_in_the_order_of_the_forward_pass():
    with connections("unix") as (ours, theirs):
        # Nobody reads yet, and the socket takes less than a part: all but the first wait.
        for part in (0, 3, 1, 2):
            ours.post(Op.PARAMS, torch.zeros(2**20), partition=part)
        heard = [theirs.receive(new_memory)[0].partition for _ in range(4)]
    assert heard == [0, 1, 2, 3]


def test_a_small_frame_waits_for_a_large_one_before_it():
    with connections("unix") as (ours, theirs):
        ours.post(Op.PUSH, torch.zeros(2**20), partition=1)
        ours.post(Op.GRAD_MASK, b"\1", partition=2)
        ours.post(Op.PUSH, b"x", partition=2)
        heard = [theirs.receive(new_memory)[0] for _ in range(3)]
    assert [(header.op, header.partition) for header in heard] == [
        (Op.PUSH, 1),
        (Op.GRAD_MASK, 2),
        (Op.PUSH, 2),
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size_bytes", [0, 1, 333, INLINE_SEND_BYTES])
def test_a_peer_that_does_not_read_blocks_no_caller_and_gets_all_frames(kind, size_bytes):
    count = 4000
    with connections(kind) as (ours, theirs):
        for step in range(count):
            ours.post(
                Op.STATS, bytes([step % 251]) * size_bytes, step=step
            )  # more than sockets hold
        came = [theirs.receive(new_memory) for _ in range(count)]
    assert [header.step for header, _ in came] == list(range(count))
    assert all(
        bytes(payload) == bytes([header.step % 251]) * size_bytes for header, payload in came
    )


def test_to_post_to_a_peer_that_has_gone_is_no_error():
    with connections("unix") as (ours, theirs):
        theirs.close()
        ours.post(Op.STEP, b"{}")
        ours.post(Op.PUSH, torch.zeros(2**20))
        with pytest.raises(ConnectionLost):
            ours.receive(new_memory)


every_kind = pytest.mark.parametrize("kind", KINDS)


def address(view: memoryview) -> int:
    return np.frombuffer(view, dtype=np.uint8).ctypes.data


def test_the_fields_are_little_endian_and_placed_as_in_the_drawing():
    header = Header(op=1, length=7, worker=4, step=6, partition=5, epoch=3, flags=2)
    packed = struct.pack("<BBHIIIQQ", 1, 2, 0, 3, 4, 5, 6, 7)
    assert (pack(header), unpack(packed), len(packed)) == (packed, header, HEADER_BYTES)


@every_kind
def test_a_tensor_goes_straight_into_a_tensors_memory(kind):
    sent = torch.randn(1024, 1025, generator=torch.Generator().manual_seed(0))
    received = torch.zeros_like(sent)
    asked = []

    def place(header: Header) -> memoryview:
        asked.append(header)
        return memoryview(received.numpy()).cast("B")

    header = Header(op=3, worker=1, step=2**40, partition=5, epoch=6, flags=7)
    with connections(kind) as (ours, theirs), beside(send, ours, header, sent.flatten()):
        came, payload = theirs.receive(place)
    assert came == header._replace(length=sent.nbytes)
    assert asked == [came]
    assert torch.equal(sent, received)
    assert address(payload) == received.data_ptr()


@every_kind
def test_payloads_of_every_size_arrive_whole_in_both_directions_at_once(kind):
    sizes = [0, 1, 43, 256 * 1024 - 1, 256 * 1024, 256 * 1024 + 1, 3 * MIB + 17]
    sent = [np.random.default_rng(size).bytes(size) for size in sizes]

    def send_all(end: Connection) -> None:
        for size, payload in zip(sizes, sent, strict=True):
            send(end, Header(op=1, partition=size), payload)

    with connections(kind) as ends, beside(send_all, ends[0]), beside(send_all, ends[1]):
        for end in ends:
            came = [end.receive(new_memory) for _ in sizes]
            assert [header.partition for header, _ in came] == sizes
            assert [bytes(payload) for _, payload in came] == sent


@every_kind
def test_many_small_frames_go_back_and_forth(kind):
    def echo() -> None:
        for _ in range(2000):
            header, payload = theirs.receive(new_memory)
            send(theirs, header, bytes(payload))

    with connections(kind) as (ours, theirs), beside(echo):
        for step in range(2000):
            send(ours, Header(op=1, step=step), step.to_bytes(4, "little") * (step % 3))
            header, payload = ours.receive(new_memory)
            assert (header.step, payload) == (step, step.to_bytes(4, "little") * (step % 3))


def test_a_frame_without_a_payload_needs_no_memory():
    def place(_header: Header) -> None:
        raise AssertionError

    with connections() as (ours, theirs):
        send(ours, Header(op=9), torch.empty(0))
        assert theirs.receive(place) == (Header(op=9), b"")


def test_a_refused_frame_leaves_the_connection_unchanged():
    with connections(limit_bytes=100) as (ours, theirs):
        with pytest.raises(WireError, match="has 101 bytes of payload; the limit is 100"):
            send(ours, Header(op=1), bytes(101))
        send(ours, Header(op=2), bytes(100))
        assert theirs.receive(new_memory)[0].op == 2


def test_a_short_frame_is_one_system_call():
    class Counting(socket.socket):
        calls = 0

        def send(self, *args, **options):
            self.calls += 1
            return super().send(*args, **options)

    with sockets() as (first, _second), Counting(fileno=first.detach()) as counting:
        ours = Connection(Stream(counting), 1000, "peer")
        send(ours, Header(op=1))
        send(ours, Header(op=1), bytes(1000))
        assert counting.calls == 2
        ours.close()


# Frames that no honest end sends


def received(sent: bytes, count: int = 1, limit_bytes: int = 1000, place: Any = new_memory):
    """Receive `count` frames from a peer that sends these bytes and closes."""
    with sockets("tcp") as (first, second):
        second.sendall(sent)
        second.close()
        with contextlib.closing(Connection(Stream(first), limit_bytes, "peer")) as peer:
            return [bytes(peer.receive(place)[1]) for _ in range(count)]


def frame(payload: bytes, length_bytes: int | None = None) -> bytes:
    length_bytes = len(payload) if length_bytes is None else length_bytes
    return pack(Header(op=1, step=1, length=length_bytes)) + payload


def test_an_oversized_frame_is_refused_before_any_memory_is_taken():
    def place(_header: Header) -> None:
        raise AssertionError

    for length_bytes in (1001, 2**40, 2**64 - 1):
        tracemalloc.start()
        try:
            with pytest.raises(WireError, match=f"has {length_bytes} bytes of payload; the limit"):
                received(frame(b"", length_bytes), place=place)
            assert tracemalloc.get_traced_memory()[1] < MIB
        finally:
            tracemalloc.stop()


def test_a_frame_cut_off_anywhere_is_a_lost_connection():
    whole = frame(b"second")
    for length in range(len(whole)):
        with pytest.raises(ConnectionLost, match="closed the connection"):
            received(frame(b"first") + whole[:length], 2)


def test_random_bytes_end_in_an_error_200_times():
    generator = random.Random(44)
    for _ in range(200):
        with pytest.raises(WireError):
            received(generator.randbytes(generator.randrange(400)), 20)


def test_after_a_refused_frame_both_ends_are_closed():
    with sockets("tcp") as (first, second):
        peer = Connection(Stream(first), 1000, "peer")
        second.sendall(frame(b"", 1001))
        with pytest.raises(WireError, match="the limit is 1000"):
            peer.receive(new_memory)
        assert read_to_end(second) == b""
        assert first.fileno() == -1
        with pytest.raises(ConnectionLost, match="this end has closed"):
            peer.receive(new_memory)


def test_a_payload_of_another_length_is_refused_and_writes_nothing():
    place = bytearray(4)
    with pytest.raises(WireError, match="sent 5 bytes for a place of 4"):
        received(frame(b"first"), place=lambda _header: place)
    assert place == bytes(4)


def test_an_error_of_place_closes_the_connection_and_goes_to_the_caller():
    def place(header: Header) -> None:
        raise LookupError(header.step)

    with pytest.raises(LookupError, match="1"):
        received(frame(b"first"), place=place)


def test_a_peer_killed_in_the_middle_of_a_frame_is_a_lost_connection():
    program = (
        "import socket, sys, time; s = socket.socket(fileno=int(sys.argv[1])); "
        "s.sendall(bytes.fromhex(sys.argv[2])); time.sleep(600)"
    )
    with sockets("tcp") as (first, second):
        handle = second.fileno()
        words = [sys.executable, "-S", "-c", program, str(handle), frame(bytes(1000))[:500].hex()]
        process = subprocess.Popen(words, pass_fds=[handle])
        second.close()
        peer = Connection(Stream(first), 1000, "peer")
        with beside(peer.receive, lambda _header: process.send_signal(signal.SIGKILL)) as receiving:
            assert isinstance(receiving.exception(), ConnectionLost)
        assert process.wait() == -signal.SIGKILL
