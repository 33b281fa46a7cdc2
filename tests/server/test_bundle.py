"""Several connections that are used as one: over real sockets, honest ones and broken ones."""

from __future__ import annotations

import contextlib
import queue
import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from shaken import KEY, MIB, PEERS, SESSION, beside, needs_gmac, new_memory, sockets

from shoal.errors import ConnectionLost, WireError
from shoal.server import channel as channels_
from shoal.server import dial as dials
from shoal.server import door as doors
from shoal.server import transport_settings as settings
from shoal.server.bundle import Bundle
from shoal.server.channel import Channel
from shoal.server.dial import dial
from shoal.server.door import Door
from shoal.server.frame import Header, pack
from shoal.server.gathering import Gathering
from shoal.server.handshake import MOST_CONNECTIONS, Strand, connect
from shoal.server.key import Key
from shoal.server.mac import GMAC, HMAC, Macs, macs
from shoal.server.messages import Op
from shoal.server.peer import Peer
from shoal.server.pieces import LEAST_BYTES, MOST_BYTES, piece_bytes
from shoal.server.stream import NOT_SENT_BYTES
from shoal.server.transport_settings import Transport

LIMIT_BYTES = 8 * MIB


@contextlib.contextmanager
def bundles(count: int, kind: str = "unix", authenticate: bool = True) -> Iterator[tuple[Bundle, list[Channel]]]:
    """One end as a bundle, and the connections of the other."""
    with contextlib.ExitStack() as open_, contextlib.ExitStack() as closing:
        pairs = [open_.enter_context(sockets(kind)) for _ in range(count)]
        ends = [
            [Channel(pair[end], keys, authenticate_payload=authenticate, limit_bytes=LIMIT_BYTES) for pair in pairs]
            for end, keys in ((0, SESSION), (1, PEERS))
        ]
        for channel in ends[1]:
            closing.callback(channel.close)
        bundle = Bundle(ends[0], LIMIT_BYTES)
        closing.callback(bundle.close)
        yield bundle, ends[1]


@contextlib.contextmanager
def pair(count: int, kind: str = "unix", authenticate: bool = True) -> Iterator[tuple[Bundle, Bundle]]:
    with bundles(count, kind, authenticate) as (ours, channels):
        theirs = Bundle(channels, LIMIT_BYTES)
        with contextlib.closing(theirs):
            yield ours, theirs


@pytest.mark.parametrize(
    ("kind", "authenticate", "count"),
    [("tcp", True, 2), ("tcp", False, 3), ("unix", True, 4), ("unix", False, MOST_CONNECTIONS)],
)
def test_frames_of_every_size_come_whole_in_order_and_where_they_belong(kind, authenticate, count):
    chance = random.Random(count)
    sizes = [0, 1, LEAST_BYTES, LEAST_BYTES + 1, 3 * MIB + 17, 5, MOST_BYTES * count * 2, LIMIT_BYTES]
    sizes += [chance.choice([0, 7, chance.randrange(MIB)]) for _ in range(30)]
    sent = [np.random.default_rng(size).bytes(size) for size in sizes]
    places = [bytearray(size) for size in sizes]

    def send() -> None:
        for number, payload in enumerate(sent):
            ours.send(Header(op=1, part=number), payload)

    with pair(count, kind, authenticate) as (ours, theirs), beside(send):
        for number, size in enumerate(sizes):
            header, payload = theirs.receive(lambda header: places[header.part])
            assert header == Header(op=1, part=number, length=size)
            assert payload == sent[number]
    assert places == [bytearray(payload) for payload in sent]


def test_both_ends_and_several_threads_send_at_once():
    def send(bundle: Bundle, worker: int) -> None:
        for step in range(20):
            bundle.send(Header(op=1, worker=worker, step=step), bytes([worker]) * (step * 20_000))

    def receive(bundle: Bundle) -> None:
        steps = [0, 0]
        for _ in range(40):
            header, payload = bundle.receive(new_memory)
            assert header.step == steps[header.worker]
            assert payload == bytes([header.worker]) * (header.step * 20_000)
            steps[header.worker] += 1

    with pair(3) as ends, ThreadPoolExecutor(6) as pool:
        working = [pool.submit(send, end, worker) for end in ends for worker in (0, 1)]
        working += [pool.submit(receive, end) for end in ends]
        assert all(each.result() is None for each in working)


def test_every_connection_carries_some_of_what_is_large_and_only_the_first_what_is_small():
    large, small = bytes(LIMIT_BYTES), bytes(LEAST_BYTES)
    with bundles(4) as (ours, channels), ThreadPoolExecutor(5) as pool:
        sending = pool.submit(ours.send, Header(op=1), large)  # a socket takes less than a piece
        assert channels[0].receive(new_memory)[0].op == Op.STRIPED
        heard = [channel.receive(new_memory)[0] for channel in channels]
        assert {header.op for header in heard} == {Op.PIECE}
        assert len({header.part for header in heard}) == 4
        reading = [pool.submit(_read_on, channel) for channel in channels]
        sending.result()
        ours.send(Header(op=2), small)
        ours.close()
        ends = [each.result() for each in reading]
    assert ends == [Header(op=2, length=LEAST_BYTES), *ends[1:]]
    assert {header.op for header in ends[1:]} == {Op.PIECE}


def _read_on(channel: Channel) -> Header:
    """To the end; the last frame."""
    header = Header(op=0)
    with contextlib.suppress(ConnectionLost):
        while True:
            header, _ = channel.receive(new_memory)
    return header


def test_a_connection_that_takes_little_carries_little():
    with bundles(2, "unix") as (ours, channels), beside(ours.send, Header(op=1), bytes(LIMIT_BYTES)):
        assert channels[0].receive(new_memory)[0].op == Op.STRIPED
        pieces = [channels[0].receive(new_memory)[0].part for _ in range(24)]  # nobody reads the second meanwhile
        assert len(set(pieces)) == 24 < LIMIT_BYTES // MOST_BYTES == 32
        with beside(_read_on, channels[0]), beside(_read_on, channels[1]):
            ours.close()


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("when", ["idle", "amid"])
def test_the_loss_of_one_connection_is_the_loss_of_all(which, when):
    written = bytearray(LIMIT_BYTES)
    with bundles(3) as (ours, channels), ThreadPoolExecutor(2) as pool:
        receiving = pool.submit(ours.receive, lambda _: written)
        if when == "amid":
            channels[0].send(Header(Op.STRIPED), pack(Header(op=1, length=LIMIT_BYTES), 0))
            channels[which].send(Header(Op.PIECE, part=5), bytes(MOST_BYTES))
        channels[which].close()
        assert isinstance(receiving.exception(), ConnectionLost)
        for channel in channels:
            with pytest.raises(ConnectionLost):
                channel.receive(new_memory)
        with pytest.raises(ConnectionLost):
            ours.send(Header(op=1), bytes(MIB))
        with pytest.raises(ConnectionLost):
            ours.send(Header(op=1))


def test_nothing_is_written_after_the_loss_was_told():
    place = bytearray(LIMIT_BYTES)
    with bundles(4, "tcp") as (ours, channels), ThreadPoolExecutor(5) as pool:
        receiving = pool.submit(ours.receive, lambda _: place)
        channels[0].send(Header(Op.STRIPED), pack(Header(op=1, length=LIMIT_BYTES), 0))
        sending = [pool.submit(_flood, channel, index) for index, channel in enumerate(channels[1:])]
        while not any(place[: 3 * 64 * MOST_BYTES : MOST_BYTES]):
            pass
        channels[0].close()
        assert isinstance(receiving.exception(), ConnectionLost)
        place[:] = bytes(LIMIT_BYTES)
        assert all(each.result() is None for each in sending)
        assert not any(place)


def _flood(channel: Channel, index: int) -> None:
    with contextlib.suppress(ConnectionLost):
        for part in range(index, 32, 3):
            channel.send(Header(Op.PIECE, part=part), b"\1" * MOST_BYTES)


@pytest.mark.parametrize(
    ("which", "header", "size"),
    [
        (1, Header(Op.PIECE, part=0), MOST_BYTES - 1),  # another length
        (1, Header(Op.PIECE, part=32), MOST_BYTES),  # beyond the end
        (0, Header(Op.PIECE, part=1, step=1), MOST_BYTES),  # another payload's
        (0, Header(Op.PUSH, part=1), MOST_BYTES),  # none at all
        (1, Header(Op.PUSH), 0),
    ],
)
def test_a_piece_that_cannot_be_the_peers_is_refused(which, header, size):
    with bundles(2) as (ours, channels), beside(ours.receive, new_memory) as receiving:
        channels[0].send(Header(Op.STRIPED), pack(Header(op=1, length=LIMIT_BYTES), 0))
        with contextlib.suppress(ConnectionLost):
            channels[which].send(header, bytes(size))
        error = receiving.exception()
        assert isinstance(error, WireError)
        assert not isinstance(error, ConnectionLost)


def test_a_piece_that_comes_twice_is_refused():
    with bundles(2) as (ours, channels), beside(ours.receive, new_memory) as receiving:
        channels[0].send(Header(Op.STRIPED), pack(Header(op=1, length=LIMIT_BYTES), 0))
        with contextlib.suppress(ConnectionLost):
            for channel in channels:
                channel.send(Header(Op.PIECE, part=3), bytes(MOST_BYTES))
        assert "repeated, or not the peer's" in str(receiving.exception())


def test_a_payload_above_the_limit_is_neither_sent_nor_given_memory():
    with pair(2) as (ours, theirs):
        with pytest.raises(WireError, match="to send has 8388609 bytes of payload"):
            ours.send(Header(op=1), bytes(LIMIT_BYTES + 1))
        with beside(ours.send, Header(op=2), bytes(MIB)):
            assert theirs.receive(new_memory)[0].op == 2
    with bundles(2) as (ours, channels), beside(ours.receive, _never) as receiving:
        channels[0].send(Header(Op.STRIPED), pack(Header(op=1, length=LIMIT_BYTES + 1), 0))
        assert "to receive has 8388609 bytes" in str(receiving.exception())


def _never(_header: Header) -> None:
    raise AssertionError


def test_last_words_are_heard_though_other_connections_end_first():
    with pair(3, "tcp") as (ours, theirs):
        peer = Peer(ours, "worker")
        for part in range(4):
            peer.post(Op.GIVE, bytes(2 * MIB), part=part)
        peer.post(Op.REFUSED, b"why", part=9)
        with beside(peer.close, flush=True):
            assert [theirs.receive(new_memory)[0].part for _ in range(5)] == [0, 1, 2, 3, 9]
        with pytest.raises(ConnectionLost):
            theirs.receive(new_memory)


def test_no_thread_is_left_of_a_bundle_that_was_closed():
    with pair(4):
        assert len(_threads()) >= 2 * 2 * 3
    for _ in range(500):
        if not _threads():
            return
        threading.Event().wait(0.01)
    raise AssertionError(_threads())


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("pieces")]


def test_both_ends_cut_a_payload_into_the_same_pieces():
    for count in (2, 4, 16):
        for length in (LEAST_BYTES + 1, 100_000, MIB, 64 * MIB):
            size = piece_bytes(length, count)
            assert LEAST_BYTES <= size <= MOST_BYTES
            assert -(-length // size) >= min(2 * count, length // LEAST_BYTES)


@pytest.mark.skipif(not hasattr(socket, "TCP_NOTSENT_LOWAT"), reason="this system has no such limit")
def test_several_connections_run_ahead_of_the_link_no_further_than_one():
    with sockets("tcp") as (first, _second):
        session = replace(SESSION, strand=Strand(bytes(16), 0, 4))
        Channel(first, session, authenticate_payload=True, limit_bytes=1)
        assert first.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == NOT_SENT_BYTES // 4


@contextlib.contextmanager
def opened() -> Iterator[tuple[Door, tuple[str, int], queue.SimpleQueue[tuple[Any, int]]]]:
    came: queue.SimpleQueue[tuple[Any, int]] = queue.SimpleQueue()
    listener = socket.create_server(("127.0.0.1", 0))
    door = Door(listener, "a server", Transport(Key(KEY), "digits", limit_bytes=LIMIT_BYTES), 2)
    thread = threading.Thread(target=door.admit, args=(lambda channel, number: came.put((channel, number)),))
    thread.start()
    try:
        yield door, listener.getsockname(), came
    finally:
        door.close()
        thread.join()


def test_a_door_lets_in_several_connections_as_one_peer():
    with opened() as (door, address, came):
        ours = [
            dial(address, Key(KEY), "digits/2", number, limit_bytes=LIMIT_BYTES, connections=3) for number in (5, 6)
        ]
        theirs = {number: channel for channel, number in (came.get(), came.get())}
        for bundle, number in zip(ours, (5, 6), strict=True):
            with beside(bundle.send, Header(op=1, worker=number), bytes(MIB)):
                assert theirs[number].receive(new_memory)[0].worker == number
            bundle.close()
            theirs[number].close()
        assert (came.empty(), door.refused) == (True, 0)


@pytest.mark.parametrize(("stays_here", "mac"), [(True, HMAC), pytest.param(False, GMAC, marks=needs_gmac)])
def test_between_machines_payloads_have_the_best_mac_that_both_ends_know(monkeypatch, stays_here, mac):
    made = []

    def seen(kind: int, key: bytes) -> Macs:
        made.append(kind)
        return macs(kind, key)

    monkeypatch.setattr(channels_, "macs", seen)
    monkeypatch.setattr(settings, "is_loopback", lambda _: stays_here)
    monkeypatch.setattr(dials, "is_loopback", lambda _: stays_here)
    with opened() as (_door, address, came):
        ours = dial(address, Key(KEY), "digits/2", 5, limit_bytes=LIMIT_BYTES)
        theirs, _number = came.get()
        with contextlib.closing(ours), contextlib.closing(theirs), beside(ours.send, Header(op=1), b"gradient"):
            assert theirs.receive(new_memory)[1] == b"gradient"
    assert made == [mac] * 4


def test_connections_that_never_become_complete_are_closed_and_counted(monkeypatch):
    monkeypatch.setattr(doors, "HANDSHAKE_S", 0.2)
    with opened() as (door, address, came), contextlib.ExitStack() as open_:
        for talk, index, count in ((b"a", 0, 3), (b"a", 2, 3), (b"b", 1, 3), (b"a", 1, 4)):
            sock = open_.enter_context(socket.create_connection(address))
            connect(sock, KEY, "digits/2", 5, strand=Strand(talk * 16, index, count))
        while door.refused < 3:
            threading.Event().wait(0.01)
        assert came.empty()


def test_a_connection_that_comes_twice_is_refused():
    with sockets() as (first, second), sockets() as (third, _fourth):
        gathering = Gathering(5.0)
        ends = [Channel(end, SESSION, authenticate_payload=True, limit_bytes=1) for end in (first, second, third)]
        with beside(gathering.join, ends[0], 5, Strand(bytes(16), 0, 2)) as joining:
            while not gathering._come:
                pass
            with pytest.raises(WireError, match="connection 0 of 2 came twice"):
                gathering.join(ends[2], 5, Strand(bytes(16), 0, 2))
            assert gathering.join(ends[1], 5, Strand(bytes(16), 1, 2)) == ends[:2]
        assert joining.result() is None
        for end in ends:
            end.close()


@pytest.mark.parametrize("strand", [Strand(bytes(16), 3, 3), Strand(bytes(16), 0, 0), Strand(bytes(16), 0, 17)])
def test_more_connections_than_there_can_be_are_refused(strand):
    with opened() as (door, address, came):
        with socket.create_connection(address) as sock:
            connect(sock, KEY, "digits/2", 5, strand=strand)
            while not door.refused:
                threading.Event().wait(0.01)
        assert came.empty()


def test_if_one_connection_is_not_let_in_the_others_are_closed():
    with opened() as (_, address, came), pytest.raises(WireError, match="another job than 'other'"):
        dial(address, Key(KEY), "other", 5, limit_bytes=LIMIT_BYTES, connections=3)
    assert came.empty()
