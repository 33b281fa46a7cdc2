"""Helpers share nothing with the rank, whatever it had open when the spawner was made."""

from __future__ import annotations

import gc
import os
import signal
import socket
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.launch.helper_spawner import HelperSpawner


def answers(listener: socket.socket, question: Callable[[], str]) -> None:
    with socket.create_connection(listener.getsockname()) as sock:
        sock.sendall(question().encode())


def answer_of(spawner: HelperSpawner, question: Callable[[], str]) -> str:
    """Return the answer of a helper."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        spawner.start(answers, question, listener=listener)
        connection, _ = listener.accept()
        with connection, connection.makefile() as lines:
            return lines.read()


class Stale:
    """A socket in a reference cycle, which only the garbage collector closes."""

    def __init__(self) -> None:
        self.myself: Any = self
        self.socket = socket.socket()


def collect_and_use() -> str:
    pairs = [socket.socketpair() for _ in range(20)]
    gc.collect()
    for first, second in pairs:
        first.sendall(b"x")
        assert second.recv(1) == b"x"
        first.close()
        second.close()
    return "all of them work"


@pytest.mark.slow
def test_a_garbage_socket_of_the_rank_closes_nothing_in_a_helper() -> None:
    gc.disable()
    try:
        for _ in range(5):
            Stale()
        spawner = HelperSpawner()
    finally:
        gc.enable()
    assert answer_of(spawner, collect_and_use) == "all of them work"
    spawner.close()
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()


def test_a_helper_has_no_connection_of_the_rank() -> None:
    local, remote = socket.socketpair()
    with local:
        with remote:
            spawner = HelperSpawner()
        assert local.recv(1) == b""
    spawner.close()


def test_helpers_end_though_nobody_reads_the_event_of_the_first(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It is so when the rank is killed while the first helper ends."""
    spawner = HelperSpawner()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first, second = (spawner.start(sleep, listener=listener) for _ in range(2))
    with socket.socket(fileno=os.dup(spawner._connection.fileno())) as events:
        events.shutdown(socket.SHUT_RD)
    os.kill(first, signal.SIGKILL)
    _wait_until_gone(first)
    spawner.close()
    _wait_until_gone(second)
    assert capfd.readouterr().err == ""


def sleep(_: socket.socket) -> None:
    time.sleep(60)


def _wait_until_gone(pid: int) -> None:
    end = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < end, f"helper {pid} lives on"
        time.sleep(0.01)
