"""A model of more parts than fit into a small message."""

from __future__ import annotations

import socket
import threading
from contextlib import closing
from pathlib import Path

import torch
from shaken import KEY

from shoal.server.arbitrate import Arbitration, Court
from shoal.server.key import Key
from shoal.server.layout import Shape, cut
from shoal.server.messages import SMALL_BYTES, Op
from shoal.server.recipe import recipe_of
from shoal.server.shard_settings import ShardSettings
from shoal.server.transport_settings import Transport
from shoal.server.views import Views

PARTS = 60_000


def test_a_worker_hears_who_answers_for_each(tmp_path: Path) -> None:
    owners = tuple(number % 2 for number in range(PARTS))
    parts = cut({"weight": Shape(PARTS, torch.float32, 0)}, 4)
    recipe = recipe_of(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]))
    settings = ShardSettings(tuple(parts), recipe, workers=1, staleness=0, lease_s=1.0)
    transport = Transport(Key(KEY), "job")
    court = Court(transport, tmp_path / "views.json", settings, owners, shards=2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        arbiter = threading.Thread(target=Arbitration(court, listener).run, daemon=True)
        arbiter.start()
        with closing(Views(0, listener.getsockname(), transport)) as views:
            views.begin()
            placement = views.placement(10)
            views.post(Op.BYE)
        arbiter.join(10)
    assert not arbiter.is_alive()
    assert placement is not None
    assert placement.owners == owners
    assert len(str(placement.to_json())) > SMALL_BYTES
