"""Signals to this process, as bytes that can be waited for beside everything else."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGTSTP)


@contextmanager
def caught() -> Iterator[socket.socket]:
    """Where SIGINT, SIGTERM and SIGTSTP arrive. Those that the process was started to ignore
    stay ignored.
    """
    numbers = [number for number in CAUGHT if signal.getsignal(number) != signal.SIG_IGN]
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.setblocking(False)
        writer.setblocking(False)
        before = {number: signal.signal(number, lambda *_: None) for number in numbers}
        descriptor = signal.set_wakeup_fd(writer.fileno())
        try:
            yield reader
        finally:
            signal.set_wakeup_fd(descriptor)
            for number, handler in before.items():
                signal.signal(number, handler)


def arrived(signals: socket.socket) -> bytes:
    """The numbers of those that have come since. Python tells of every signal that anybody handles,
    such as a library's SIGCHLD; those are not for us."""
    try:
        return bytes(number for number in signals.recv(64) if number in CAUGHT)
    except BlockingIOError:
        return b""
