"""Helpers are processes of their own, whatever the rank had in hand when the nursery was made."""

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


def asked(nursery: HelperSpawner, question: Callable[[], str]) -> str:
    """What a helper answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nursery.start(answers, question, listener=listener)
        connection, _ = listener.accept()
        with connection, connection.makefile() as lines:
            return lines.read()


class Stale:
    """A socket that only the collector of cycles closes."""

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


def test_what_the_rank_had_dropped_closes_nothing_in_a_helper() -> None:
    gc.disable()
    try:
        for _ in range(5):
            Stale()
        nursery = HelperSpawner()
    finally:
        gc.enable()
    assert asked(nursery, collect_and_use) == "all of them work"
    nursery.close()
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()


def test_a_helper_has_no_connection_of_the_rank() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            nursery = HelperSpawner()
        assert ours.recv(1) == b""
    nursery.close()


def test_helpers_end_though_nobody_hears_of_the_first_one_any_more(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """As when the rank is killed while the first one ends."""
    nursery = HelperSpawner()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first, second = (nursery.start(sleep, listener=listener) for _ in range(2))
    nursery._socket.shutdown(socket.SHUT_RD)
    os.kill(first, signal.SIGKILL)
    _wait_until_gone(first)
    nursery.close()
    _wait_until_gone(second)
    assert capfd.readouterr().err == ""


def sleep(_: socket.socket) -> None:
    time.sleep(60)


def _wait_until_gone(pid: int) -> None:
    end = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < end, f"helper {pid} lives on"
        time.sleep(0.01)
