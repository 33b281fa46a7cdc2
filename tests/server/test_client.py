"""A worker's side of its servers, before any of them is there."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
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
from shoal.server.frame import Header
from shoal.server.key import Key
from shoal.server.layout import Shape, cut
from shoal.server.messages import Op
from shoal.server.placement import Placement
from shoal.server.transport_settings import Transport


def lonely(monkeypatch: pytest.MonkeyPatch, *lengths: int) -> Client:
    """A client of a shard that has been retired, with a part for each length."""

    def views(*_: Any, placed: Any, **__: Any) -> Any:
        placement = Placement(1, (0,) * len(lengths))
        slow = threading.Timer(0.2, placed, [placement])  # its thread is slow to say so
        retired = View(0, epoch=1, retired=True)
        return SimpleNamespace(begin=slow.start, placement=lambda _: placement, newest=lambda *_: retired)

    monkeypatch.setattr(routes, "Views", views)
    names = {f"weight {number}": length for number, length in enumerate(lengths)}
    parts = cut({name: Shape(length, torch.float32, 0) for name, length in names.items()}, 4 * max(lengths))
    flat = Flat({name: nn.Parameter(torch.zeros(length)) for name, length in names.items()}, parts)
    return Client(0, parts, ("127.0.0.1", 1), flat, transport=Transport(Key(KEY), "job"))


def test_a_client_is_ready_when_it_has_links_and_not_when_the_placement_has_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = lonely(monkeypatch, 4)
    assert client.routes._route(0)[0].shard == 0


def test_each_of_two_threads_waits_for_what_it_has_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    client = lonely(monkeypatch, 4, 4)
    client.begin()
    client.step = 1
    with ThreadPoolExecutor(2) as pool:
        second = pool.submit(client.wait, [1])
        time.sleep(0.1)
        first = pool.submit(client.wait, [0])
        time.sleep(0.1)
        client._take(0, Header(Op.VALUE, part=0, step=1, epoch=1), memoryview(b""), None)
        assert not wait([second], timeout=0.3).done
        client._take(0, Header(Op.VALUE, part=1, step=1, epoch=1), memoryview(b""), None)
        assert wait([first, second], timeout=5).not_done == set()


def test_a_shard_that_has_left_tells_nothing_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lonely(monkeypatch, 4).figures(limit_s=0.2) == []
