"""A worker's connection to one shard: what goes out when."""

from __future__ import annotations

import json
import queue
import socket
import threading
import weakref
from contextlib import closing
from typing import Any, cast

import pytest
import torch
from shaken import KEY, beside, new_memory

from shoal.comm.memory import Memory
from shoal.errors import ServerLost
from shoal.server.arbiter import View
from shoal.server.channel import Channel
from shoal.server.frame import Header
from shoal.server.handshake import accept
from shoal.server.key import Key
from shoal.server.link import Link
from shoal.server.messages import SHARED, Op
from shoal.server.transport_settings import Transport
from shoal.server.views import Views

PART_BYTES = 4 * 2**20


class OneServer:
    """In place of an arbiter: who listens here is the primary."""

    def __init__(self, listener: socket.socket) -> None:
        self.view = View(0, epoch=1, primary=7, addresses={7: listener.getsockname()})

    def newest(self, *_: object) -> View:
        return self.view


def linked(listener: socket.socket, memory: Memory, **given: Any) -> tuple[Link, Channel]:
    """A worker's link, and the other end of its connection."""
    link = Link(
        1,
        0,
        cast(Views, OneServer(listener)),
        transport=Transport(Key(KEY), "job", limit_bytes=2 * PART_BYTES),
        **{
            "place": lambda *_: None,
            "take": lambda *_: None,
            "answered": lambda *_: None,
            "moved": lambda *_: None,
            "lent": memory,
            "lent_at": {},
            "waits": lambda *_: True,
            "lost": lambda _: None,
            "order": None,
            **given,
        },
    )
    connection, _ = listener.accept()
    session, _ = accept(connection, KEY, "job/7")
    return link, Channel(connection, session, authenticate_payload=False, limit_bytes=2 * PART_BYTES)


def test_a_steps_order_overtakes_gradients_that_wait_to_be_sent():
    memory = Memory(64)
    with socket.create_server(("127.0.0.1", 0)) as listener, closing(memory):
        link, server = linked(listener, memory)
        # Nobody reads yet, and the socket takes less than a part: all but the first wait.
        for part in range(4):
            link.push(part, (0, torch.zeros(PART_BYTES // 4), b"\1", False), now=True)
        link.order(0, b"{}")
        heard = [server.receive(new_memory)[0] for _ in range(5)]
        with beside(link.close):
            server.close()
    assert [header.part for header in heard if header.op == Op.PUSH] == [0, 1, 2, 3]
    assert Op.ORDER in [header.op for header in heard[:3]]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_value_that_cannot_be_right_ends_the_wait_for_it():
    def take(*_: object) -> None:
        raise AssertionError("stale")

    memory, lost = Memory(64), queue.SimpleQueue[ServerLost]()
    with socket.create_server(("127.0.0.1", 0)) as listener, closing(memory):
        link, server = linked(listener, memory, take=take, lost=lost.put)
        server.send(Header(Op.VALUE))
        assert "what its server said cannot be right (AssertionError('stale'))" in str(lost.get())
        with beside(link.close):
            server.close()
        for thread in [thread for thread in threading.enumerate() if thread.name == "shard 0"]:
            thread.join()  # or its exception would be one of the next test


@pytest.mark.parametrize("shares", [True, False])
def test_a_gradient_is_laid_in_lent_memory_for_a_server_that_reads_there_and_for_no_other(shares):
    with socket.create_server(("127.0.0.1", 0)) as listener, closing(Memory(1024)) as memory:
        link, server = linked(listener, memory, lent_at={0: 64})
        assert server.receive(new_memory)[0].op == Op.SHARE
        server.send(Header(Op.SHARE), json.dumps(memory.description if shares else {}).encode())
        if shares:
            assert server.receive(new_memory) == (Header(Op.SHARE, 2), b"{}")
        gradient = torch.arange(1.0, 9.0)
        link.push(0, (0, gradient, b"\1", False), now=True)
        header, payload = server.receive(new_memory)
        assert (header.op, bool(header.flags & SHARED)) == (Op.PUSH, shares)
        assert torch.equal(memory.tensor(64, 8, torch.float32), gradient if shares else torch.zeros(8))
        assert bytes(payload) == (b"" if shares else gradient.numpy().tobytes())
        kept = weakref.ref(gradient)
        del gradient
        assert (kept() is None) == shares  # what is not laid anywhere may have to be said again
        with beside(link.close):
            server.close()
