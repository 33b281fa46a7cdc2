"""The launcher hears the signals that are meant for it, and no others."""

import os
import signal
from select import select

from shoal.launch.supervise import arrived, caught


def test_a_signal_that_somebody_else_handles_asks_for_nothing() -> None:
    before = signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        with caught() as signals:
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGCHLD):
                os.kill(os.getpid(), number)
            select([signals], [], [], 10)
            assert arrived(signals) == bytes([signal.SIGTERM])
            assert arrived(signals) == b""
    finally:
        signal.signal(signal.SIGCHLD, before)
