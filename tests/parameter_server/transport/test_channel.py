"""Frames between two honest ends, over real sockets, and frames that no honest end sends."""

from __future__ import annotations

import collections
import contextlib
import random
import signal
import socket
import struct
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from connected_channels import KINDS, MIB, beside, channels, new_memory, read_to_end, sockets

from shoal.errors import ConnectionLost, WireError
from shoal.parameter_server.transport.channel import Channel
from shoal.parameter_server.transport.frame import HEADER_BYTES, Header, pack, unpack
from shoal.parameter_server.transport.stream import Stream

every_kind = pytest.mark.parametrize("kind", KINDS)
FULL = Header(
    op=255,
    length=2**64 - 1,
    worker=2**32 - 1,
    step=2**64 - 2,
    partition=2**32 - 2,
    epoch=2**32 - 3,
    flags=254,
)


def address(view: memoryview) -> int:
    return np.frombuffer(view, dtype=np.uint8).ctypes.data


@pytest.mark.parametrize("header", [Header(op=0), FULL])
def test_a_header_comes_back_as_it_was_packed(header):
    assert unpack(pack(header)) == header


def test_the_fields_are_little_endian_and_placed_as_in_the_drawing():
    header = Header(op=1, length=7, worker=4, step=6, partition=5, epoch=3, flags=2)
    assert pack(header) == struct.pack("<BBHIIIQQ", 1, 2, 0, 3, 4, 5, 6, 7)


@every_kind
def test_a_tensor_goes_straight_into_a_tensors_memory(kind):
    sent = torch.randn(1024, 1025, generator=torch.Generator().manual_seed(0))
    received = torch.zeros_like(sent)
    asked = []

    def place(header: Header) -> memoryview:
        asked.append(header)
        return memoryview(received.numpy()).cast("B")

    header = Header(op=3, worker=1, step=2**40, partition=5, epoch=6, flags=7)
    with channels(kind) as (ours, theirs), beside(ours.send, header, sent.numpy()):
        came, payload = theirs.receive(place)
    assert came == header._replace(length=sent.nbytes)
    assert asked == [came]
    assert torch.equal(sent, received)
    assert address(payload) == received.data_ptr()


@every_kind
def test_payloads_of_every_size_arrive_whole_in_both_directions_at_once(kind):
    sizes = [0, 1, 43, 256 * 1024 - 1, 256 * 1024, 256 * 1024 + 1, 3 * MIB + 17]
    sent = [np.random.default_rng(size).bytes(size) for size in sizes]

    def send(end: Channel) -> None:
        for size, payload in zip(sizes, sent, strict=True):
            end.send(Header(op=1, partition=size), payload)

    with channels(kind) as ends, beside(send, ends[0]), beside(send, ends[1]):
        for end in ends:
            came = [end.receive(new_memory) for _ in sizes]
            assert [header.partition for header, _ in came] == sizes
            assert [bytes(payload) for _, payload in came] == sent


@every_kind
def test_many_small_frames_go_back_and_forth(kind):
    def echo() -> None:
        for _ in range(2000):
            theirs.send(*theirs.receive(new_memory))

    with channels(kind) as (ours, theirs), beside(echo):
        for step in range(2000):
            ours.send(Header(op=1, step=step), step.to_bytes(4, "little") * (step % 3))
            header, payload = ours.receive(new_memory)
            assert (header.step, payload) == (step, step.to_bytes(4, "little") * (step % 3))


@every_kind
def test_a_frame_that_the_system_takes_at_once_is_sent_without_waiting(kind):
    with channels(kind) as (ours, theirs):
        assert ours.try_send(Header(op=1, partition=7), b"1")
        assert theirs.receive(new_memory)[0].partition == 7


@every_kind
def test_a_partly_sent_frame_is_continued_where_it_stopped(kind):
    sent = [np.random.default_rng(number).bytes(7 * MIB) for number in range(3)]

    def send_on() -> None:
        ours.flush()
        ours.send(Header(op=1, partition=1), sent[1])
        if not ours.try_send(Header(op=1, partition=2), sent[2]):
            ours.flush()

    with channels(kind) as (ours, theirs):
        assert not ours.try_send(Header(op=1, partition=0), sent[0])  # nobody reads
        with beside(send_on) as sending:
            came = [theirs.receive(new_memory) for _ in sent]
        assert sending.result() is None
    assert [header.partition for header, _ in came] == [0, 1, 2]
    assert [bytes(payload) for _, payload in came] == sent


@every_kind
def test_sending_to_a_peer_that_has_gone_is_an_error(kind):
    with channels(kind) as (ours, theirs):
        theirs.close()
        with pytest.raises(ConnectionLost):
            collections.deque(ours.try_send(Header(op=1)) for _ in range(100))


@every_kind
def test_a_peer_that_has_gone_ends_no_process_by_a_signal(kind):
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        with channels(kind) as (ours, theirs):
            theirs.close()
            with pytest.raises(ConnectionLost):
                collections.deque(ours.send(Header(op=1)) for _ in range(100))
    finally:
        signal.signal(signal.SIGPIPE, before)


def test_a_frame_without_a_payload_needs_no_memory():
    def place(_header: Header) -> None:
        raise AssertionError

    with channels() as (ours, theirs):
        ours.send(Header(op=9), torch.empty(0, 3).numpy())
        assert theirs.receive(place) == (Header(op=9), b"")


def test_a_refused_frame_leaves_the_channel_unchanged():
    with channels(limit_bytes=100) as (ours, theirs):
        with pytest.raises(WireError, match="has 101 bytes of payload; the limit is 100"):
            ours.send(Header(op=1), bytes(101))
        with pytest.raises(TypeError):
            ours.send(Header(op=1), torch.zeros(4, 4).T[:, :2].numpy())
        ours.send(Header(op=2), bytes(100))
        assert theirs.receive(new_memory)[0].op == 2


def test_a_short_frame_is_one_system_call():
    class Counting(socket.socket):
        calls = 0

        def sendmsg(self, *args, **options):
            self.calls += 1
            return super().sendmsg(*args, **options)

        def sendall(self, *args, **options):
            raise AssertionError

    with sockets() as (first, _second), Counting(fileno=first.detach()) as counting:
        ours = Channel(Stream(counting), 1000)
        ours.send(Header(op=1))
        ours.send(Header(op=1), bytes(1000))
        assert counting.calls == 2
        ours.close()


@every_kind
def test_close_wakes_waiting_threads_of_either_end(kind):
    with channels(kind) as (ours, theirs), ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(ours.receive, new_memory), pool.submit(theirs.receive, new_memory)]
        ours.close()
        assert all(isinstance(waiter.exception(), ConnectionLost) for waiter in waiting)
    with channels(kind) as (ours, theirs), ThreadPoolExecutor(1) as pool:
        # Nobody reads, so this blocks once the socket is full, or comes too late; it is lost either
        # way.
        sending = pool.submit(lambda: [ours.send(Header(op=1), bytes(MIB)) for _ in range(64)])
        theirs.receive(new_memory)
        ours.close()
        assert isinstance(sending.exception(), ConnectionLost)


def test_the_descriptor_goes_with_the_last_user():
    with sockets() as (first, second):
        ours = Channel(Stream(first), 1)
        second.sendall(b"part of a frame")
        with beside(ours.receive, new_memory) as receiving:
            ours.close()
            ours.close()
            assert isinstance(receiving.exception(), ConnectionLost)
        assert first.fileno() == -1
        with pytest.raises(ConnectionLost, match="this end has closed"):
            ours.send(Header(op=1))
        with pytest.raises(ConnectionLost, match="this end has closed"):
            ours.receive(new_memory)


def test_two_threads_that_receive_are_a_bug():
    with channels() as (ours, theirs):

        def place(_header: Header) -> None:
            with pytest.raises(AssertionError, match="two threads receive"):
                theirs.receive(new_memory)

        ours.send(Header(op=1), b"x")
        assert theirs.receive(place)[1] == b"x"


def test_a_tcp_connection_delays_nothing_and_detects_a_peer_that_has_gone():
    with sockets("tcp") as (first, _second):
        Stream(first)
        assert first.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert first.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert first.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000


# Frames that no honest end sends


def received(sent: bytes, count: int = 1, limit_bytes: int = 1000, place: Any = new_memory):
    """Receive `count` frames from a peer that sends these bytes and closes."""
    with sockets("tcp") as (first, second):
        second.sendall(sent)
        second.close()
        with contextlib.closing(Channel(Stream(first), limit_bytes)) as channel:
            return [bytes(channel.receive(place)[1]) for _ in range(count)]


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
        channel = Channel(Stream(first), 1000)
        second.sendall(frame(b"", 1001))
        with pytest.raises(WireError, match="the limit is 1000"):
            channel.receive(new_memory)
        assert read_to_end(second) == b""
        assert first.fileno() == -1
        with pytest.raises(ConnectionLost):
            channel.send(Header(op=1))


def test_a_payload_of_another_length_is_refused_and_writes_nothing():
    place = bytearray(4)
    with pytest.raises(WireError, match="sent 5 bytes for a place of 4"):
        received(frame(b"first"), place=lambda _header: place)
    assert place == bytes(4)


def test_an_error_of_place_closes_the_channel_and_goes_to_the_caller():
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
        peer = subprocess.Popen(words, pass_fds=[handle])
        second.close()
        channel = Channel(Stream(first), 1000)
        with beside(channel.receive, lambda _header: peer.send_signal(signal.SIGKILL)) as receiving:
            assert isinstance(receiving.exception(), ConnectionLost)
        assert peer.wait() == -signal.SIGKILL


def test_the_header_is_32_bytes():
    assert len(pack(FULL)) == HEADER_BYTES == 32
