"""The launcher receives SIGINT, SIGTERM and SIGTSTP, and no other signals."""

import os
import signal
from select import select

from shoal.launch.supervise import arrived, caught


def test_a_signal_with_another_handler_does_not_arrive() -> None:
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
