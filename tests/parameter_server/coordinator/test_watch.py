"""Subscription to the coordinator."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

from shoal.parameter_server.coordinator.watch import ClusterWatcher
from shoal.parameter_server.transport.key import Key
from shoal.parameter_server.transport.settings import Transport

KEY = bytes(range(32))


def test_a_watcher_connects_in_begin_and_not_before():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        with closing(
            ClusterWatcher(0, listener.getsockname(), Transport(Key(KEY), "job"))
        ) as watcher:
            with pytest.raises(TimeoutError):
                listener.accept()
            watcher.begin()
            listener.settimeout(5)
            listener.accept()[0].close()
