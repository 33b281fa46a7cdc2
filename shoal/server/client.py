"""A worker's side of its servers: parts go out as they are ready and come back straight into the parameters.

backward ── push part 7 ── push part 6 ── ...          a thread for each shard sends
step     ── order
forward     waits for part 0 ── part 1 ── ...          a thread for each shard receives
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ServerLost
from shoal.server.arbiter import Address
from shoal.server.flat import Flat
from shoal.server.frame import Header
from shoal.server.layout import Part
from shoal.server.link import Link
from shoal.server.messages import Op, pack_order, pack_part, unpack_part, view
from shoal.server.shard import Order
from shoal.server.shared import Attached, offsets
from shoal.server.views import Views


class Client:
    """One worker's connections to all shards. Use it from one thread at a time.

    Args:
        worker: this worker's number.
        parts: of the whole model.
        owners: the shard of each part.
        shards: how many there are.
        arbiter: where it listens.
        flat: this worker's memory: values are written there as they come.
        shares: whether gradients are read from its memory by servers of this machine.
        staleness: which no answer may exceed; None for any.

    Attributes:
        step: steps that were ordered so far.
        stop_at: how many steps all workers take before they stop, once one has asked for it; 0 before.
    """

    def __init__(
        self,
        worker: int,
        parts: Sequence[Part],
        owners: Sequence[int],
        shards: int,
        arbiter: Address,
        flat: Flat,
        *,
        key: bytes,
        job: str,
        staleness: int | None = 0,
        shares: bool = True,
    ) -> None:
        self.worker, self.parts, self.owners, self.values = worker, parts, owners, flat.values
        self._places = _places(parts, owners, shards, None if staleness == 0 else worker)
        self.staleness, self.step, self.stop_at = staleness, 0, 0
        self._news = threading.Condition()
        self._arrived = [0] * len(parts)
        self._failure: ServerLost | None = None
        self._gone = threading.Event()
        most = max((part.size_bytes for part in parts), default=0)
        self.views = Views(worker, arbiter, key, job, answered=lambda _: self._gone.set())
        self._links = [
            Link(
                worker,
                shard,
                [part.number for part in parts if owners[part.number] == shard],
                self.views,
                key=key,
                job=job,
                limit_bytes=8 * most + 2**20,
                place=self._place,
                lent=flat.lent,
                lent_at={p.number: at for p, at in zip(parts, flat.lent_at, strict=True) if shares},
                take=self._take,
                waits=lambda part, clock: self._arrived[part] < clock,
                lost=self._lose,
            )
            for shard in range(shards)
        ]

    def push(self, part: int, gradient: Tensor, present: bytes) -> None:
        """Send a part's gradient of the step that is under way; it must not change until `wait` has returned."""
        self.wait([part])
        self._links[self.owners[part]].push(part, (self.step, gradient, present))

    def order(self, order: Order) -> None:
        """Have the servers take the step, now that every part was pushed."""
        self.wait(range(len(self.parts)))
        payload = pack_order(order)
        step, self.step = self.step, self.step + 1
        for link in self._links:
            link.order(step, payload)

    def wait(self, parts: Iterable[int]) -> None:
        """Until the values of the last step are here. Raises ServerLost."""
        with self._news:
            for part in parts:
                while self._arrived[part] < self.step:
                    if self._failure is not None:
                        raise self._failure
                    self._news.wait()

    def ask_to_stop(self) -> None:
        """Have all workers stop after the same step, which none of them has reached."""
        if not self.stop_at:
            self._links[0].post(Op.STOP)

    def pull(self) -> None:
        """Wait for the newest values of all parts. Every worker must have waited for its own before."""
        with self._news:
            self._arrived = [-1] * len(self.parts)
        for part in self.parts:
            self._links[self.owners[part.number]].post(Op.PULL, part=part.number)
        self.wait(range(len(self.parts)))

    def squared_norm(self) -> float:
        """Of all gradients of the step that is under way, over all workers. Every worker must have pushed or will."""
        answers = [link.ask(Op.NORM, step=self.step) for link in self._links]
        return sum(float.fromhex(bytes(answer).decode()) for answer in answers)

    def gradient(self, part: int) -> tuple[Tensor, bytes]:
        """A part's gradient, summed over all workers, and which of its segments have one."""
        payload = self._links[self.owners[part]].ask(Op.GRADIENT, part=part, step=self.step)
        segments = len(self.parts[part].segments)
        numbers = torch.frombuffer(bytearray(payload[segments:]), dtype=self.parts[part].dtype)
        return numbers, bytes(payload[:segments])

    def load(self, states: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Have the servers begin at this worker's `values`, with these optimizer states, at this worker's step."""
        for part, state in zip(self.parts, states, strict=True):
            payload = pack_part(self.values[part.number], list(state), {})
            self._links[self.owners[part.number]].ask(Op.LOAD, payload, part=part.number, step=self.step)
        self.begin()

    def begin(self) -> None:
        """Take the values that are here for those of the servers."""
        with self._news:
            self._arrived = [self.step] * len(self.parts)

    def state(self, part: int) -> list[dict[str, Any]]:
        """The optimizer's state of each segment of a part."""
        return unpack_part(self._links[self.owners[part]].ask(Op.STATE, part=part))[1]

    def figures(self) -> list[dict[str, Any]]:
        """What each shard's primary tells of itself."""
        return [json.loads(bytes(link.ask(Op.FIGURES))) for link in self._links]

    def close(self, limit_s: float = 5.0) -> None:
        """Hang up, for good: the arbiter is told."""
        self.views.post(Op.BYE)
        self._gone.wait(limit_s)
        self.views.close()
        for link in self._links:
            link.close()

    def _lose(self, error: ServerLost) -> None:
        with self._news:
            self._failure = self._failure or error
            self._news.notify_all()

    def _place(self, header: Header) -> memoryview | None:
        return view(self.values[header.part]) if header.op == Op.VALUE else None

    def _take(self, header: Header, borrowed: Attached | None) -> None:
        clock, oldest = header.step, header.epoch
        if borrowed is not None:
            part = self.parts[header.part]
            lying = borrowed.tensor(self._places[header.part], part.length, part.dtype)
            self.values[header.part].copy_(lying)
        assert self.staleness is None or oldest >= clock - self.staleness, (clock, oldest, self.staleness)
        with self._news:
            self._arrived[header.part] = clock
            self.stop_at = self.stop_at or header.worker
            self._news.notify_all()


def _places(parts: Sequence[Part], owners: Sequence[int], shards: int, reader: int | None) -> dict[int, int]:
    """Where in its server's memory each part lies, in bytes, or this reader's copy of it."""
    found: dict[int, int] = {}
    for shard in range(shards):
        at, length_bytes = offsets(part for part in parts if owners[part.number] == shard)
        found |= {
            number: place + (0 if reader is None else (1 + reader) * length_bytes) for number, place in at.items()
        }
    return found
