"""Subscription to the coordinator."""

from __future__ import annotations

from contextlib import closing

import pytest

from shoal.parameter_server.coordinator.watch import ClusterWatcher
from shoal.parameter_server.transport.key import Key
from shoal.parameter_server.transport.settings import UNIX, Transport, address_of, listen

KEY = bytes(range(32))


def test_a_watcher_connects_in_begin_and_not_before():
    with listen(UNIX) as listener:
        listener.settimeout(0.2)
        with closing(
            ClusterWatcher(0, address_of(listener), Transport(Key(KEY), "job"))
        ) as watcher:
            with pytest.raises(TimeoutError):
                listener.accept()
            watcher.begin()
            listener.settimeout(5)
            listener.accept()[0].close()
