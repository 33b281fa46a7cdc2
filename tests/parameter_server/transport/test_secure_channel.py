"""Frames between two honest ends, over real sockets."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from connected_channels import (
    KEY,
    KINDS,
    MIB,
    PEERS,
    SESSION,
    beside,
    channels,
    every_mac,
    new_memory,
    sockets,
)

from shoal.errors import ConnectionLost, WireError
from shoal.parameter_server.transport.frame import Header
from shoal.parameter_server.transport.handshake import accept, connect
from shoal.parameter_server.transport.secure_channel import SecureChannel, is_loopback

both = pytest.mark.parametrize(
    ("kind", "authenticate"), [(kind, flag) for kind in KINDS for flag in (True, False)]
)


def address(view: memoryview) -> int:
    return np.frombuffer(view, dtype=np.uint8).ctypes.data


@both
def test_a_tensor_goes_straight_into_a_tensors_memory(kind, authenticate):
    sent = torch.randn(1024, 1025, generator=torch.Generator().manual_seed(0))
    received = torch.zeros_like(sent)
    asked = []

    def place(header: Header) -> memoryview:
        asked.append(header)
        return memoryview(received.numpy()).cast("B")

    header = Header(op=3, worker=1, step=2**40, partition=5, epoch=6, flags=7)
    with channels(kind, authenticate) as (ours, theirs), beside(ours.send, header, sent.numpy()):
        came, payload = theirs.receive(place)
    assert came == header._replace(length=sent.nbytes)
    assert asked == [came]
    assert torch.equal(sent, received)
    assert address(payload) == received.data_ptr()


@every_mac
@both
def test_payloads_of_every_size_arrive_whole(kind, authenticate, mac):
    sizes = [0, 1, 43, 256 * 1024 - 1, 256 * 1024, 256 * 1024 + 1, 3 * MIB + 17]
    sent = [np.random.default_rng(size).bytes(size) for size in sizes]

    def send() -> None:
        for size, payload in zip(sizes, sent, strict=True):
            ours.send(Header(op=1, partition=size), payload)

    with channels(kind, authenticate, mac=mac) as (ours, theirs), beside(send):
        came = [theirs.receive(new_memory) for _ in sizes]
    assert [header.partition for header, _ in came] == sizes
    assert [bytes(payload) for _, payload in came] == sent


@both
def test_several_threads_send_whole_frames(kind, authenticate):
    def send(worker: int) -> None:
        for step in range(250):
            ours.send(Header(op=1, worker=worker, step=step), bytes([worker]) * (step * 37))

    with channels(kind, authenticate) as (ours, theirs), ThreadPoolExecutor(4) as pool:
        sending = [pool.submit(send, worker) for worker in range(4)]
        came = [theirs.receive(new_memory) for _ in range(4 * 250)]
        assert all(sent.result() is None for sent in sending)
    for worker in range(4):
        mine = [(header.step, payload) for header, payload in came if header.worker == worker]
        assert [step for step, _ in mine] == list(range(250))
        assert all(payload == bytes([worker]) * (step * 37) for step, payload in mine)


@both
def test_many_small_frames_go_back_and_forth(kind, authenticate):
    def echo() -> None:
        for _ in range(2000):
            theirs.send(*theirs.receive(new_memory))

    with channels(kind, authenticate) as (ours, theirs), beside(echo):
        for step in range(2000):
            ours.send(Header(op=1, step=step), step.to_bytes(4, "little") * (step % 3))
            header, payload = ours.receive(new_memory)
            assert (header.step, payload) == (step, step.to_bytes(4, "little") * (step % 3))


def test_a_frame_that_the_system_takes_at_once_is_sent_without_waiting():
    with channels("unix") as (ours, theirs):
        assert ours.try_send(Header(op=1, partition=7))
        assert theirs.receive(new_memory)[0].partition == 7


@pytest.mark.parametrize("kind", KINDS)
def test_a_partly_sent_frame_is_continued_where_it_stopped(kind):
    sent = [np.random.default_rng(number).bytes(3 * MIB) for number in range(3)]

    def send_on() -> None:
        ours.send(
            Header(op=1, partition=0), sent[0]
        )  # some of it is with the system since it was offered
        ours.send(Header(op=1, partition=1), sent[1])
        if not ours.try_send(Header(op=1, partition=2), sent[2]):
            ours.send(Header(op=1, partition=2), sent[2])

    with channels(kind, authenticate=False) as (ours, theirs):
        assert not ours.try_send(Header(op=1, partition=0), sent[0])  # nobody reads
        with beside(send_on) as sending:
            came = [theirs.receive(new_memory) for _ in sent]
        assert sending.result() is None
    assert [header.partition for header, _ in came] == [0, 1, 2]
    assert [bytes(payload) for _, payload in came] == sent


def test_try_send_to_a_peer_that_has_gone_is_an_error():
    with channels("unix") as (ours, theirs):
        theirs.close()
        with pytest.raises(ConnectionLost):
            ours.try_send(Header(op=1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_session_of_a_handshake_carries_frames_both_ways(kind):
    with sockets(kind) as (first, second):
        with beside(accept, second, KEY, "digits") as accepting:
            mine = connect(first, KEY, "digits", 3)
        theirs, _worker = accepting.result()
        ours = SecureChannel(first, mine, authenticate_payload=True, limit_bytes=10)
        server = SecureChannel(second, theirs, authenticate_payload=True, limit_bytes=10)
        ours.send(Header(op=1), b"push")
        server.send(Header(op=2), b"pull")
        assert ours.receive(new_memory)[1] == b"pull"
        assert server.receive(new_memory)[1] == b"push"
        ours.close()
        server.close()


def test_a_frame_without_a_payload_needs_no_memory():
    def place(_header: Header) -> None:
        raise AssertionError

    with channels() as (ours, theirs):
        ours.send(Header(op=9), torch.empty(0, 3).numpy())
        assert theirs.receive(place) == (Header(op=9), b"")


def test_a_refused_frame_leaves_the_channel_unchanged():
    with channels(limit_bytes=100) as (ours, theirs):
        with pytest.raises(WireError, match="to send has 101 bytes of payload; the limit is 100"):
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
        ours = SecureChannel(counting, SESSION, authenticate_payload=True, limit_bytes=1000)
        ours.send(Header(op=1))
        ours.send(Header(op=1), bytes(1000))
        assert counting.calls == 2
        ours.close()


@pytest.mark.parametrize("kind", KINDS)
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
        ours = SecureChannel(first, SESSION, authenticate_payload=False, limit_bytes=1)
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


def test_a_tcp_channel_delays_nothing_and_detects_a_peer_that_has_gone():
    with sockets("tcp") as (first, _second):
        SecureChannel(first, PEERS, authenticate_payload=False, limit_bytes=1)
        assert first.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert first.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            assert first.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000


def test_loopback_is_a_unix_socket_or_an_address_of_this_host_only():
    for kind in KINDS:
        with sockets(kind) as ends:
            assert all(is_loopback(end) for end in ends)

    def peer(family: socket.AddressFamily, host: str) -> SimpleNamespace:
        return SimpleNamespace(family=family, getpeername=lambda: (host, 1, 0, 0))

    assert is_loopback(peer(socket.AF_INET6, "::1"))
    assert is_loopback(peer(socket.AF_INET6, "::ffff:127.0.0.1"))
    assert not is_loopback(peer(socket.AF_INET6, "::ffff:10.0.0.1"))
    assert not is_loopback(peer(socket.AF_INET6, "fe80::1%eth0"))
    assert not is_loopback(peer(socket.AF_INET, "10.0.0.1"))
    with socket.socket() as unconnected, pytest.raises(ConnectionLost, match="has gone"):
        is_loopback(unconnected)
