"""Liveness of the other processes of a host."""

import os
import subprocess
import sys
import threading
import time

from shoal.shm_backend.waiter import PeerLiveness


def test_threads_may_ask_at_the_same_time() -> None:
    peers, errors = PeerLiveness({0: os.getpid()}), list[BaseException]()
    end = time.monotonic() + 0.3

    def ask() -> None:
        try:
            while time.monotonic() < end:
                assert peers.dead() == []
        except BaseException as error:  # noqa: BLE001 - whatever it is
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    peers.close()
    assert not errors


def test_who_has_ended_is_told() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    peers = PeerLiveness({0: os.getpid(), 1: process.pid})
    assert peers.dead() == []
    process.kill()
    process.communicate()
    assert peers.dead() == [1]
    assert peers.state(1) == "has ended"
    peers.close()
    assert peers.dead() == []
