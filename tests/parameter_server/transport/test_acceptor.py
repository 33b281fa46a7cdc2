"""Connections to a listening socket: silent strangers, no free descriptors, and peers."""

from __future__ import annotations

import contextlib
import errno
import logging
import queue
import socket
import threading
from collections.abc import Iterator

import pytest
from connected_channels import KEY, read_to_end

from shoal.parameter_server.transport import settings
from shoal.parameter_server.transport.acceptor import HANDSHAKES, Acceptor
from shoal.parameter_server.transport.connection import Connection
from shoal.parameter_server.transport.key import Key
from shoal.parameter_server.transport.settings import Transport

TRANSPORT = Transport(Key(KEY), "digits", limit_bytes=100, encrypt=False)


class Scarce(socket.socket):
    """A listener on a system that has no free descriptor, two times."""

    failures = 2

    def accept(self):
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


@contextlib.contextmanager
def opened(listener: socket.socket) -> Iterator[tuple[Acceptor, queue.SimpleQueue[int]]]:
    """Run an acceptor; yield it, and a queue of the numbers of its peers."""
    came: queue.SimpleQueue[int] = queue.SimpleQueue()

    def serve(peer: Connection, number: int) -> None:
        came.put(number)
        peer.close()

    acceptor = Acceptor(listener, "a server", TRANSPORT, 2)
    thread = threading.Thread(target=acceptor.accept, args=(serve,))
    thread.start()
    try:
        yield acceptor, came
    finally:
        acceptor.close()
        thread.join()


def visit(address: tuple[str, int], number: int) -> None:
    TRANSPORT.connect(address, 2, number).close()


def test_silent_strangers_do_not_keep_out_a_peer_with_the_key(monkeypatch):
    # Without the limit, the strangers would keep the acceptor busy for ten minutes.
    monkeypatch.setattr(settings, "HANDSHAKE_S", 600.0)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    address = listener.getsockname()
    with opened(listener) as (acceptor, came), contextlib.ExitStack() as silent:
        strangers = [
            silent.enter_context(socket.create_connection(address)) for _ in range(HANDSHAKES + 3)
        ]
        for stranger in strangers[:3]:  # the oldest have to go
            assert len(read_to_end(stranger)) == 6
        visit(address, 7)
        assert came.get() == 7
        for stranger in strangers:
            stranger.close()
        while acceptor.refused < len(strangers):
            threading.Event().wait(0.01)


def test_a_system_without_free_descriptors_closes_no_listener():
    with Scarce() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with opened(listener) as (acceptor, came):
            visit(listener.getsockname(), 5)
            assert came.get() == 5
            assert (acceptor.refused, listener.failures) == (0, 0)


def test_a_flood_is_counted_fully_and_logged_in_few_lines(caplog):
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    with opened(listener) as (acceptor, _), caplog.at_level(logging.WARNING, "shoal.server"):
        for _ in range(100):
            with socket.create_connection(listener.getsockname()) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                read_to_end(stranger)
        while acceptor.refused < 100:
            threading.Event().wait(0.01)
    assert len(caplog.records) == 7
    assert (
        "a server has refused 64, the last because: the peer is no Shoal worker: it" in caplog.text
    )


@pytest.mark.parametrize("times", [1, 2])
def test_a_closed_acceptor_accepts_nobody(times):
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    with opened(listener) as (acceptor, _):
        for _ in range(times):
            acceptor.close()
    with pytest.raises(ConnectionRefusedError):
        visit(address, 1)
