"""A worker's side of its servers, before any of them is there."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shaken import KEY
from torch import nn

from shoal.server import routes
from shoal.server.arbiter import View
from shoal.server.client import Client
from shoal.server.flat import Flat
from shoal.server.key import Key
from shoal.server.layout import Shape, cut
from shoal.server.placement import Placement


def test_a_client_is_ready_when_it_has_links_and_not_when_the_placement_has_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def views(*_: Any, placed: Any, **__: Any) -> Any:
        placement = Placement(1, (0,))
        threading.Timer(0.2, placed, [placement]).start()  # its thread is slow to say so
        retired = View(0, epoch=1, retired=True)
        return SimpleNamespace(placement=lambda _: placement, newest=lambda *_: retired)

    monkeypatch.setattr(routes, "Views", views)
    parts = cut({"weight": Shape(4, torch.float32, 0)})
    flat = Flat({"weight": nn.Parameter(torch.zeros(4))}, parts)
    client = Client(0, parts, ("127.0.0.1", 1), flat, key=Key(KEY), job="job")
    assert client.routes._route(0)[0].shard == 0
