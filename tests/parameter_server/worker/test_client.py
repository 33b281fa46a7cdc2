"""A worker's calls that wait, over a network that does what it is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch
from torch import nn

from shoal.errors import ServerLost
from shoal.parameter_server.codec import Op
from shoal.parameter_server.coordinator.coordinator import Placement, View
from shoal.parameter_server.events import StepRequest
from shoal.parameter_server.partitioning import ParamMeta, partition
from shoal.parameter_server.worker.client import WorkerClient
from shoal.parameter_server.worker.flat_params import FlatParams
from shoal.parameter_server.worker.session import (
    AnswerMessage,
    ConnectShard,
    RequestMessage,
    SessionAction,
    ShardMessage,
    ToShard,
    ValuesMessage,
)


class OneShard:
    """A network with one shard, which keeps what it is sent."""

    owner: WorkerClient

    def __init__(self, partitions: int) -> None:
        self.partitions = partitions
        self.sent: list[ShardMessage] = []

    def start(self, owner: WorkerClient) -> None:
        self.owner = owner
        self.carry_out(owner.session.placement_changed(Placement(1, (0,) * self.partitions)))
        self.carry_out(owner.session.connected(View(0, epoch=1, primary=0)))

    def carry_out(self, actions: Iterable[SessionAction]) -> None:
        for action in actions:
            if isinstance(action, ToShard):
                self.sent.append(action.message)
            elif not isinstance(action, ConnectShard):
                self.owner.handle(action)  # type: ignore[arg-type]

    def close(self, limit_s: float) -> None:
        pass

    def deliver(self, message: ValuesMessage | AnswerMessage) -> None:
        """As the thread of a connection does."""
        with self.owner.lock:
            if isinstance(message, ValuesMessage):
                assert self.owner.session.accept(0, message)
            self.carry_out(self.owner.session.receive(0, message))

    def tell(self, happened: Callable[[], list[SessionAction]]) -> None:
        with self.owner.lock:
            self.carry_out(happened())


def connected(*lengths: int) -> tuple[WorkerClient, OneShard]:
    """A client with a part for each length."""
    names = {f"weight {number}": length for number, length in enumerate(lengths)}
    shapes = {name: ParamMeta(length, torch.float32, 0) for name, length in names.items()}
    parameters = {name: nn.Parameter(torch.zeros(length)) for name, length in names.items()}
    network = OneShard(len(lengths))
    return WorkerClient(
        FlatParams(parameters, partition(shapes, 4 * max(lengths))), network
    ), network


def step(client: WorkerClient) -> None:
    for part in client.parts:
        client.push(part.number, torch.zeros(part.length), b"\1")
    client.request_step(StepRequest([{"lr": 1.0}]))


def test_each_of_two_threads_waits_for_what_it_has_asked_for() -> None:
    client, network = connected(4, 4)
    step(client)
    with ThreadPoolExecutor(2) as pool:
        second = pool.submit(client.wait, [1])
        time.sleep(0.1)
        first = pool.submit(client.wait, [0])
        time.sleep(0.1)
        network.deliver(ValuesMessage(0, clock=1, oldest=1))
        assert not wait([second], timeout=0.3).done
        network.deliver(ValuesMessage(1, clock=1, oldest=1))
        assert wait([first, second], timeout=5).not_done == set()


def test_a_shard_that_has_left_tells_nothing_of_itself() -> None:
    client, network = connected(4)
    network.tell(lambda: client.session.view_changed(View(0, epoch=2, retired=True)))
    assert client.stats() == []


def test_a_shard_that_leaves_while_it_is_asked_ends_the_wait() -> None:
    client, network = connected(4)
    with ThreadPoolExecutor(1) as pool:
        figures = pool.submit(client.stats)
        time.sleep(0.1)
        retired = View(0, epoch=2, retired=True)
        network.tell(lambda: client.session.view_changed(retired)[1:])  # but for the hanging up
        assert figures.result(5) == []


def test_a_shard_that_says_nothing_is_waited_for_no_longer_than_told() -> None:
    client, network = connected(4)
    assert client.stats(limit_s=0.2) == []
    assert network.sent[-1] == RequestMessage(Op.STATS, 0, 0, b"")


def test_a_wait_ends_when_a_shard_is_lost() -> None:
    client, network = connected(4)
    step(client)
    lost = threading.Timer(0.1, network.tell, [lambda: client.session.fail(0, "it burned")])
    lost.start()
    with pytest.raises(ServerLost, match="shard 0 of the parameter servers is lost: it burned"):
        client.wait([0])
    with pytest.raises(ServerLost):
        client.stats()
    lost.join()
