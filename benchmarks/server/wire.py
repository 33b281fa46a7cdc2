"""Shared code of the candidates with own sockets: parts, connections and a thread for each."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

PART_BYTES = 4 << 20
FLOAT_BYTES = 4


def parts(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a float32 tensor, PART_BYTES at a time."""
    whole = memoryview(tensor.numpy()).cast("B")
    return (whole[begin : begin + PART_BYTES] for begin in range(0, len(whole), PART_BYTES))


def fill(connection: socket.socket, buffer: memoryview) -> bool:
    """Receive until `buffer` is full; False when the peer has gone instead."""
    while buffer:
        received = connection.recv_into(buffer)
        if not received:
            return False
        buffer = buffer[received:]
    return True


def connect(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def accept_all(
    listener: socket.socket,
    count: int,
    announce: Callable[[Any], None],
    serve: Callable[[socket.socket], None],
) -> None:
    """Serve `count` connections in a thread each; return when they have ended."""
    announce(
        listener.getsockname()[1] if listener.family == socket.AF_INET else listener.getsockname()
    )
    threads = []
    with listener:
        for _ in range(count):
            connection, _ = listener.accept()
            if listener.family == socket.AF_INET:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threads.append(threading.Thread(target=serve, args=(connection,)))
            threads[-1].start()
    for thread in threads:
        thread.join()
