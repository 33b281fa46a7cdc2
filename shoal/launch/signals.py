"""Signals to this process, as bytes that can be waited for beside everything else."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def caught() -> Iterator[socket.socket]:
    """Where SIGINT, SIGTERM and SIGTSTP arrive. Those that the process was started to ignore stay ignored."""
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGTSTP) if signal.getsignal(n) != signal.SIG_IGN]
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
    """The numbers of those that have come since."""
    try:
        return signals.recv(64)
    except BlockingIOError:
        return b""
