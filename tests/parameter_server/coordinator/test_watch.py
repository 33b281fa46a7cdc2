"""Subscription to the coordinator, whose placement need not fit into a small message."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch

from shoal.parameter_server.cluster_config import ClusterConfig, ShardSettings
from shoal.parameter_server.codec import MAX_CONTROL_BYTES, Op
from shoal.parameter_server.coordinator.coordinator import Placement
from shoal.parameter_server.coordinator.coordinator_server import CoordinatorServer
from shoal.parameter_server.coordinator.watch import ClusterWatcher
from shoal.parameter_server.optimizer_spec import recipe_of
from shoal.parameter_server.partitioning import ParamMeta, partition
from shoal.parameter_server.transport.key import Key
from shoal.parameter_server.transport.settings import UNIX, Transport, address_of, listen

KEY = bytes(range(32))
PARTS = 60_000


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


def test_a_worker_gets_the_owner_of_each_of_many_partitions(tmp_path: Path) -> None:
    owners = tuple(number % 2 for number in range(PARTS))
    parts = partition({"weight": ParamMeta(PARTS, torch.float32, 0)}, 4)
    recipe = recipe_of(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]))
    settings = ShardSettings(tuple(parts), recipe, workers=1, staleness=0, lease_s=1.0)
    transport = Transport(Key(KEY), "job")
    config = ClusterConfig(transport, tmp_path, settings, owners, shards=2)
    with listen(UNIX) as listener:
        coordinator = threading.Thread(target=CoordinatorServer(config, listener).run, daemon=True)
        coordinator.start()
        placed: SimpleQueue[Placement] = SimpleQueue()
        address = address_of(listener)
        with closing(ClusterWatcher(0, address, transport, placed=placed.put)) as watcher:
            watcher.begin()
            placement = placed.get(timeout=10)
            watcher.post(Op.LEAVE)
        coordinator.join(10)
    assert not coordinator.is_alive()
    assert placement.owners == owners
    assert len(str(placement.to_json())) > MAX_CONTROL_BYTES
