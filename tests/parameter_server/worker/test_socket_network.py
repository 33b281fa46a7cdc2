"""A worker's connections: what goes out when, and what ends a wait."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from connected_channels import KEY, beside, new_memory, send

from shoal.errors import ConnectionLost, ServerLost
from shoal.parameter_server.codec import SHARED, Op
from shoal.parameter_server.coordinator.coordinator import Placement, View
from shoal.parameter_server.coordinator.coordinator_server import COORDINATOR
from shoal.parameter_server.partitioning import ParamMeta, partition
from shoal.parameter_server.transport.connection import Connection, Header
from shoal.parameter_server.transport.key import Key
from shoal.parameter_server.transport.settings import UNIX, Transport, address_of, listen
from shoal.parameter_server.worker.session import SessionEvent, ShardFailed, WorkerSession
from shoal.parameter_server.worker.socket_network import SocketNetwork
from shoal.shm_backend.segment import SharedSegment

PART_BYTES = 4 * 2**20
PARTS = partition({name: ParamMeta(8, torch.float32, 0) for name in "abcd"}, 32)
PRIMARY = 7
TRANSPORT = Transport(Key(KEY), "job", limit_bytes=2 * PART_BYTES)


class Owner:
    """Has a session, and keeps its events."""

    def __init__(self, partitions: int) -> None:
        self.session = WorkerSession(partitions)
        self.lock = threading.Lock()
        self.events = queue.SimpleQueue[SessionEvent]()

    def handle(self, event: SessionEvent) -> None:
        self.events.put(event)


class Worker:
    """A worker's network, with this test as the coordinator and as the only server.

    Attributes: coordinator, server: the other ends of its connections.
    """

    def __init__(self, memory: SharedSegment, lent_at: list[int], values: torch.Tensor) -> None:
        self.owner = Owner(4)
        self.listener = listen(UNIX)
        coordinator = listen(UNIX)
        flat: Any = SimpleNamespace(parts=PARTS, values=[values] * 4, lent=memory, lent_at=lent_at)
        network = SocketNetwork(1, address_of(coordinator), TRANSPORT, flat, shares=bool(lent_at))
        self.network = network
        with coordinator, beside(network.start, self.owner) as starting:
            self.coordinator = self.accepted(coordinator, COORDINATOR)
            self.tell_view(View(0, 1, PRIMARY, addresses={PRIMARY: address_of(self.listener)}))
            self.tell(Op.PLACEMENT, Placement(1, (0,) * 4).to_json())
            self.server = self.accepted(self.listener, PRIMARY)
            starting.result(10)

    def accepted(self, listener: socket.socket, name: int | str) -> Connection:
        connection, _ = listener.accept()
        return TRANSPORT.accept(connection, name)[0]

    def tell(self, op: Op, message: Any) -> None:
        send(self.coordinator, Header(op), json.dumps(message).encode())

    def tell_view(self, view: View) -> None:
        self.tell(Op.VIEW, view.to_json())

    def push(self, part: int, gradient: torch.Tensor) -> None:
        with self.owner.lock:
            self.network.carry_out(self.owner.session.push(part, gradient, b"\1"))

    def request_step(self) -> None:
        with self.owner.lock:
            self.network.carry_out(self.owner.session.request_step(b"{}"))

    def close(self) -> None:
        with beside(self.network.close, 0.1):
            self.server.close()
        self.coordinator.close()
        self.listener.close()
        for thread in [thread for thread in threading.enumerate() if thread.name == "shard 0"]:
            thread.join(10)  # or its exception would be one of the next test


@contextlib.contextmanager
def connected(
    lent_at: list[int] | None = None, values: torch.Tensor | None = None
) -> Iterator[tuple[Worker, SharedSegment]]:
    with contextlib.closing(SharedSegment(1024)) as memory:
        into = torch.zeros(8) if values is None else values
        with contextlib.closing(Worker(memory, lent_at or [], into)) as worker:
            yield worker, memory


def test_a_steps_order_overtakes_gradients_that_wait_to_be_sent():
    with connected() as (worker, _):
        # Nobody reads yet, and the socket takes less than a part: all but the first wait.
        for part in range(4):
            worker.push(part, torch.zeros(PART_BYTES // 4))
        worker.request_step()
        heard = [worker.server.receive(new_memory)[0] for _ in range(5)]
    assert [header.partition for header in heard if header.op == Op.PUSH] == [0, 1, 2, 3]
    assert Op.STEP in [header.op for header in heard[:3]]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_value_that_cannot_be_right_ends_the_wait_for_it():
    with connected() as (worker, _):
        for _ in range(2):
            worker.request_step()
        send(worker.server, Header(Op.PARAMS, partition=0, step=2, epoch=1))
        lost = worker.owner.events.get(timeout=10)
    assert isinstance(lost, ShardFailed)
    assert isinstance(lost.error, ServerLost)
    assert "what its server said cannot be right (AssertionError((2, 1, 0)))" in str(lost.error)


def test_values_are_received_where_the_parameters_lie():
    values = torch.zeros(8)
    with connected(values=values) as (worker, _):
        worker.request_step()
        sent = torch.arange(8.0)
        header = Header(Op.PARAMS, partition=2, step=1, epoch=1)
        send(worker.server, header, sent.numpy().tobytes())
        assert worker.owner.events.get(timeout=10) == (2, 1)
        assert torch.equal(values, sent)
        # The same values once more may not change what is being computed with by now.
        send(worker.server, header, (sent + 1).numpy().tobytes())
        send(worker.server, Header(Op.PARAMS, partition=3, step=1, epoch=1), sent.numpy().tobytes())
        assert worker.owner.events.get(timeout=10) == (3, 1)
        assert torch.equal(values, sent)


@pytest.mark.parametrize("shares", [True, False])
def test_a_gradient_is_laid_in_lent_memory_for_a_server_that_reads_there_and_for_no_other(shares):
    with connected(lent_at=[64]) as (worker, memory):
        assert worker.server.receive(new_memory)[0].op == Op.USE_SHARED_MEMORY
        description = memory.description if shares else {}
        send(worker.server, Header(Op.USE_SHARED_MEMORY), json.dumps(description).encode())
        if shares:
            assert worker.server.receive(new_memory) == (Header(Op.USE_SHARED_MEMORY, 2), b"{}")
        gradient = torch.arange(1.0, 9.0)
        worker.push(0, gradient)
        header, payload = worker.server.receive(new_memory)
        assert (header.op, bool(header.flags & SHARED)) == (Op.PUSH, shares)
        lent = memory.tensor(64, 8, torch.float32)
        assert torch.equal(lent, gradient if shares else torch.zeros(8))
        assert bytes(payload) == (b"" if shares else gradient.numpy().tobytes())
        kept = weakref.ref(gradient)
        del gradient
        assert (kept() is None) == shares  # what is not laid anywhere may have to be said again


def test_a_primary_that_was_replaced_is_hung_up_on_and_its_successor_hears_all_again():
    with connected() as (worker, _), listen(UNIX) as listener:
        worker.push(1, torch.ones(8))
        worker.request_step()
        heard = [worker.server.receive(new_memory)[0] for _ in range(2)]
        successor = View(0, epoch=2, primary=8, addresses={8: address_of(listener)})
        worker.tell_view(successor)
        with pytest.raises(ConnectionLost):
            worker.server.receive(new_memory)
        worker.server = worker.accepted(listener, 8)
        again = [worker.server.receive(new_memory)[0] for _ in range(2)]
    key = [(header.op, header.partition, header.step) for header in heard]
    assert key == [(header.op, header.partition, header.step) for header in again]


def test_a_lost_shard_is_said_once_with_what_to_do():
    with connected() as (worker, _):
        worker.tell_view(View(0, epoch=2, lost=True))
        lost = worker.owner.events.get(timeout=10)
    assert isinstance(lost, ShardFailed)
    assert "shard 0 of the parameter servers is lost: its servers are gone" in str(lost.error)
    assert "replicas=2" in str(lost.error)
