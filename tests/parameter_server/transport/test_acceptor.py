"""Connections to a listening socket: silent strangers, no free descriptors, and peers."""

from __future__ import annotations

import contextlib
import errno
import logging
import queue
import socket
import threading
from collections.abc import Iterator
from functools import partial

import pytest
from connected_channels import KEY, read_to_end

from shoal.parameter_server.transport import settings
from shoal.parameter_server.transport.acceptor import HANDSHAKES, Acceptor
from shoal.parameter_server.transport.handshake import accept, connect
from shoal.parameter_server.transport.key import Key
from shoal.parameter_server.transport.secure_channel import SecureChannel
from shoal.parameter_server.transport.settings import Transport


class Scarce(socket.socket):
    """A listener on a system that has no descriptor left, twice."""

    failures = 2

    def accept(self):
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


@contextlib.contextmanager
def opened(listener: socket.socket) -> Iterator[tuple[Acceptor, queue.SimpleQueue[int]]]:
    """A door that lets in, and the numbers of those who came."""
    came: queue.SimpleQueue[int] = queue.SimpleQueue()

    def attend(channel: SecureChannel, number: int) -> None:
        came.put(number)
        channel.close()

    door = Acceptor(listener, "a server", Transport(Key(KEY), "digits", limit_bytes=100), 2)
    thread = threading.Thread(target=door.accept, args=(attend,))
    thread.start()
    try:
        yield door, came
    finally:
        door.close()
        thread.join()


def visit(address: tuple[str, int], number: int) -> None:
    with socket.create_connection(address) as sock:
        connect(sock, KEY, "digits/2", number)


def test_strangers_that_say_nothing_do_not_keep_out_who_holds_the_key(monkeypatch):
    # They would keep it for ten minutes.
    monkeypatch.setattr(settings, "accept", partial(accept, limit_s=600.0))
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    address = listener.getsockname()
    with opened(listener) as (door, came), contextlib.ExitStack() as silent:
        strangers = [
            silent.enter_context(socket.create_connection(address)) for _ in range(HANDSHAKES + 3)
        ]
        for stranger in strangers[:3]:  # the oldest have to go
            assert len(read_to_end(stranger)) == 39
        visit(address, 7)
        assert came.get() == 7
        for stranger in strangers:
            stranger.close()
        while door.refused < len(strangers):
            threading.Event().wait(0.01)


def test_a_system_without_descriptors_closes_no_door():
    with Scarce() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with opened(listener) as (door, came):
            visit(listener.getsockname(), 5)
            assert came.get() == 5
            assert (door.refused, listener.failures) == (0, 0)


def test_a_flood_is_counted_whole_and_logged_in_few_lines(caplog):
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    with opened(listener) as (door, _), caplog.at_level(logging.WARNING, "shoal.server"):
        for _ in range(100):
            with socket.create_connection(listener.getsockname()) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                read_to_end(stranger)
        while door.refused < 100:
            threading.Event().wait(0.01)
    assert len(caplog.records) == 7
    assert "a server has refused 64, the last because: the peer is no Shoal worker" in caplog.text


@pytest.mark.parametrize("times", [1, 2])
def test_a_closed_door_admits_nobody(times):
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    with opened(listener) as (door, _):
        for _ in range(times):
            door.close()
    with pytest.raises(ConnectionRefusedError):
        visit(address, 1)
