"""Bytes over sockets that several threads share, plain and under TLS."""

from __future__ import annotations

import collections
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from connected_channels import KINDS, MIB, beside, sockets, streams

from shoal.errors import ConnectionLost
from shoal.parameter_server.transport.stream import Stream

every_kind = pytest.mark.parametrize("kind", KINDS)


def received(stream: Stream, size_bytes: int) -> bytes:
    into = bytearray(size_bytes)
    stream.receive(memoryview(into))
    return bytes(into)


@every_kind
def test_what_is_partly_sent_is_continued_where_it_stopped(kind: str) -> None:
    sent = [np.random.default_rng(number).bytes(7 * MIB) for number in range(3)]

    def send_on() -> None:
        ours.send(sent[1])
        if not ours.try_send(sent[2]):
            ours.send()

    with streams(kind) as (ours, theirs):
        assert not ours.try_send(sent[0])  # nobody reads
        with beside(send_on) as sending:
            assert [received(theirs, len(data)) for data in sent] == sent
        assert sending.result() is None


@every_kind
def test_a_peer_that_has_gone_is_an_error_and_no_signal(kind: str) -> None:
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        for name in ("send", "try_send"):
            with streams(kind) as (ours, theirs):
                theirs.close()
                with pytest.raises(ConnectionLost):
                    collections.deque(getattr(ours, name)(b"1") for _ in range(100))
    finally:
        signal.signal(signal.SIGPIPE, before)


@every_kind
def test_close_wakes_waiting_threads_of_either_end(kind: str) -> None:
    with streams(kind) as (ours, theirs), ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(received, end, 1) for end in (ours, theirs)]
        ours.close()
        assert all(isinstance(waiter.exception(), ConnectionLost) for waiter in waiting)
    with streams(kind) as (ours, theirs), ThreadPoolExecutor(1) as pool:
        # Nobody reads, so this blocks once the socket is full, or comes too late; it is lost either
        # way.
        sending = pool.submit(lambda: [ours.send(bytes(MIB)) for _ in range(64)])
        received(theirs, 1)
        ours.close()
        assert isinstance(sending.exception(), ConnectionLost)


def test_the_descriptor_goes_with_the_last_user() -> None:
    with sockets() as (first, second):
        ours = Stream(first)
        second.sendall(b"part of a frame")
        with beside(received, ours, 100) as receiving:
            ours.close()
            ours.close()
            assert isinstance(receiving.exception(), ConnectionLost)
        assert first.fileno() == -1
        for use in (lambda: ours.send(b"1"), lambda: received(ours, 1)):
            with pytest.raises(ConnectionLost, match="this end has closed"):
                use()


def test_a_tcp_connection_delays_nothing_and_detects_a_peer_that_has_gone() -> None:
    with sockets("tcp") as (first, _second):
        Stream(first)
        assert first.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert first.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert first.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
