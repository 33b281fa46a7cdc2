"""A worker's side of its servers: parts go out as they are ready and come back straight into the parameters.

backward ── push part 7 ── push part 6 ── ...          a thread for each shard sends
step     ── order
forward     waits for part 0 ── part 1 ── ...          a thread for each shard receives

To whom, `routes.py` knows.
"""

from __future__ import annotations

import ipaddress
import json
import statistics
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.comm.memory import Attached
from shoal.errors import ServerLost
from shoal.server import blocks
from shoal.server.arbiter import Address
from shoal.server.flat import Flat
from shoal.server.frame import Header
from shoal.server.history import Event
from shoal.server.layout import Part, offsets
from shoal.server.link import RECOVER_S, Link
from shoal.server.messages import BLOCKS, Op, pack_order, pack_part, unpack_part, view
from shoal.server.peer import Payload
from shoal.server.routes import Moved, Ordered, Routes
from shoal.server.said import Order
from shoal.server.slots import slot_of
from shoal.server.transport_settings import Transport
from shoal.server.views import Views
from shoal.trace.recorder import Flight, Recorder

UNEVEN = 2.0
"""Shards whose bandwidths differ by less are taken for alike: one measurement is no better than that."""


class Client:
    """One worker's connections to all shards. Use it from one thread at a time.

    Args:
        worker: this worker's number.
        parts: of the whole model.
        arbiter: where it listens.
        flat: this worker's memory: values are written there as they come.
        transport: settings of the job.
        shares: whether gradients are read from its memory by servers of this machine.
        staleness: which no answer may exceed; None for any.
        recorder: is told when parts go and come. awaited: ranks whose gradients a step waits for.

    Attributes:
        step: steps that were ordered so far.
        stop_at: how many steps all workers take before they stop, once one has asked for it; 0 before.
    """

    def __init__(
        self,
        worker: int,
        parts: Sequence[Part],
        arbiter: Address,
        flat: Flat,
        *,
        transport: Transport,
        staleness: int | None = 0,
        shares: bool = True,
        recorder: Recorder | None = None,
        awaited: tuple[int, ...] = (),
    ) -> None:
        self.worker, self.parts, self.values = worker, parts, flat.values
        self._places, own_bytes = offsets(parts)
        self._copy_at = slot_of(worker, staleness) * own_bytes
        self.staleness, self.step, self.stop_at = staleness, 0, 0
        self._news = threading.Condition()
        self._arrived = [0] * len(parts)
        self._wanted: set[int] = set()
        self._answers: dict[tuple[int, int], memoryview] = {}
        self._failure: ServerLost | None = None
        self._recorder, self._awaited = recorder or Recorder(), awaited
        self._flights: dict[int, Flight] = {}
        self._far = not ipaddress.ip_address(arbiter[0]).is_loopback  # servers of one machine do not differ
        self._flat, self._transport, self._shares = flat, transport.for_parts(parts), shares
        self._collected: dict[int, dict[str, int]] = {}
        self.routes = Routes(len(parts), self._link)
        self.routes.begin(worker, arbiter, transport)

    def push(self, part: int, gradient: Tensor, present: bytes, sparse: bool = False) -> None:
        """Send a part's gradient of the step that is under way; it must not change until `wait` has returned.

        Args: sparse: most of it is zeros, which need not be sent.
        """
        self.wait([part])
        if self._recorder.on:
            self._flights[part] = self._recorder.depart(
                f"push and pull part {part}", gradient.nbytes, f"part {part}", self._awaited
            )
        self.routes.push(part, (self.step, gradient, present, sparse))

    def order(self, order: Order) -> None:
        """Have the servers take the step, now that every part was pushed."""
        self.wait(range(len(self.parts)))
        self.step += 1
        self.routes.order(self.step - 1, pack_order(order))

    def wait(self, parts: Iterable[int]) -> None:
        """Until the values of the last step are here. Raises ServerLost."""
        with self._news:
            for some in ([part] for part in parts) if self._recorder.on else [parts]:
                self._await(some)

    def _await(self, parts: Iterable[int]) -> None:
        """Sleep until all of them are here: to be woken for each takes longer than most take to come."""
        missing, begun_ns = [part for part in parts if self._arrived[part] < self.step], self._recorder.now()
        # With what another thread waits for; what one that was interrupted has waited for may be here.
        self._wanted = {part for part in (*self._wanted, *missing) if self._arrived[part] < self.step}
        while self._wanted:
            if self._failure is not None:
                raise self._failure
            self._news.wait()
        for part in missing:
            if part in self._flights:
                self._recorder.blocked(self._flights[part], begun_ns)

    def ask_to_stop(self) -> None:
        """Have all workers stop after the same step, which none of them has reached."""
        if not self.stop_at:
            self.routes.post(Op.STOP)

    def pull(self) -> None:
        """Wait for the newest values of all parts. Every worker must have waited for its own before."""
        with self._news:
            self._arrived = [-1] * len(self.parts)
        self.routes.ask(Op.PULL, dict.fromkeys(range(len(self.parts)), b""), self.step)
        self.wait(range(len(self.parts)))

    def squared_norm(self) -> float:
        """Of all gradients of the step that is under way, over all workers. Every worker must have pushed or will."""
        answers = self._ask(Op.NORM, dict.fromkeys(range(len(self.parts)), b""))
        return sum(float.fromhex(bytes(answers[part.number]).decode()) for part in self.parts)

    def squared_norm_of(self, part: int) -> float:
        """Of a part's gradient, likewise."""
        return float.fromhex(bytes(self._ask(Op.NORM, {part: b""})[part]).decode())

    def gradient(self, part: int) -> tuple[Tensor, bytes]:
        """A part's gradient, summed over all workers, and which of its segments have one."""
        payload = self._ask(Op.GRADIENT, {part: b""})[part]
        segments = len(self.parts[part].segments)
        numbers = torch.frombuffer(bytearray(payload[segments:]), dtype=self.parts[part].dtype)
        return numbers, bytes(payload[:segments])

    def load(self, states: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Have the servers begin at this worker's `values`, with these optimizer states, at this worker's step."""
        taken = dict[int, list[float]]()
        for part, state in zip(self.parts, states, strict=True):
            owner, begun_s = self.routes.owner(part.number), time.perf_counter()
            payload = pack_part(self.values[part.number], list(state), {})
            self.load_part(part.number, payload)
            taken.setdefault(owner, []).append(len(payload) / (time.perf_counter() - begun_s))
        self.begin()
        if self._far:
            self.measured({shard: statistics.median(rates) for shard, rates in taken.items()})

    def load_part(self, part: int, packed: bytes) -> None:
        """Have the servers begin a part at what `pack_part` has packed."""
        self._ask(Op.LOAD, {part: packed})

    def measured(self, bytes_per_s: Mapping[int, float]) -> None:
        """Tell the arbiter how fast each shard takes parts in, if that differs enough to place parts by it."""
        if bytes_per_s and max(bytes_per_s.values()) > UNEVEN * min(bytes_per_s.values()):
            self.routes.views.post(Op.SPEEDS, json.dumps([*bytes_per_s.items()]).encode())

    def begin(self) -> None:
        """Take the values that are here for those of the servers."""
        with self._news:
            self._arrived = [self.step] * len(self.parts)

    def state(self, part: int) -> list[dict[str, Any]]:
        """The optimizer's state of each segment of a part."""
        return unpack_part(memoryview(self.packed_state(part)))[1]

    def packed_state(self, part: int) -> bytes:
        """A part's values and state as `pack_part` packs them."""
        return bytes(self._ask(Op.STATE, {part: b""})[part])

    def figures(self, limit_s: float = RECOVER_S) -> list[dict[str, Any]]:
        """What each shard's primary tells of itself; nothing of one that has left meanwhile."""
        shards = self.routes.shards()
        for shard in shards:
            self.routes.ask_shard(shard, Op.FIGURES)
        answers = [self._await_answer(Op.FIGURES, shard, limit_s) for shard in shards]
        return [json.loads(bytes(answer)) for answer in answers if answer is not None]

    def record(self) -> None:
        """Have all shards, later ones too, note what they apply and give out. For every worker, before it pushes."""
        self.routes.record()

    def history(self, limit_s: float = RECOVER_S) -> list[Event]:
        """What shards have noted since the last call. Always the same worker calls it.

        A shard that leaves, or is replaced, takes with it what was not asked for: its notes are missing here.
        """
        shards, found = self.routes.shards(), list[Event]()
        while shards:
            for shard in shards:
                known = self._collected.setdefault(shard, {"server": -1, "first": 0})
                self.routes.ask_shard(shard, Op.HISTORY, json.dumps(known).encode())
            shards = [shard for shard in shards if self._collect(shard, found, limit_s)]
        return found

    def _collect(self, shard: int, found: list[Event], limit_s: float) -> bool:
        """Add a piece of a shard's notes; whether there are more."""
        said = self._await_answer(Op.HISTORY, shard, limit_s)
        if said is None:
            return False
        answer = json.loads(bytes(said))
        found += [Event(*event) for event in answer["events"]]
        self._collected[shard] = {"server": answer["server"], "first": answer["first"] + len(answer["events"])}
        return bool(answer["more"])

    def close(self, limit_s: float = 5.0) -> None:
        """Hang up, for good: the arbiter is told."""
        self.routes.close(limit_s)

    def _ask(self, op: Op, payloads: Mapping[int, Payload]) -> dict[int, memoryview]:
        """Ask about several parts at once, and wait for all answers. Raises ServerLost."""
        self.routes.ask(op, payloads, self.step)
        found = {part: self._await_answer(op, part) for part in payloads}
        return {part: answer for part, answer in found.items() if answer is not None}  # all of them: there is no limit

    def _await_answer(self, op: Op, about: int, limit_s: float | None = None) -> memoryview | None:
        """What was said of a part or a shard; None where that takes too long. Raises ServerLost."""
        key = (op, about)
        with self._news:
            self._news.wait_for(lambda: key in self._answers or self._failure is not None, limit_s)
            if key not in self._answers and self._failure is not None:
                raise self._failure
            return self._answers.pop(key, None)

    def _link(self, shard: int, views: Views, moved: Moved, order: Ordered | None) -> Link:
        return Link(
            self.worker,
            shard,
            views,
            transport=self._transport,
            place=self._place,
            take=self._take,
            answered=self._answered,
            moved=moved,
            lent=self._flat.lent,
            lent_at={p.number: at for p, at in zip(self.parts, self._flat.lent_at, strict=True) if self._shares},
            waits=lambda part, clock: self._arrived[part] < clock,
            lost=self._lose,
            order=order,
        )

    # What comes

    def _lose(self, error: ServerLost) -> None:
        with self._news:
            self._failure = self._failure or error
            self._news.notify_all()

    def _answered(self, header: Header, payload: memoryview) -> None:
        with self._news:
            self._answers[header.op, header.part] = payload
            self._news.notify_all()

    def _place(self, shard: int, header: Header) -> memoryview | None:
        """A part's own memory, unless the part has moved and this is the last that its old owner has to say."""
        is_whole = not header.flags & BLOCKS
        return view(self.values[header.part]) if is_whole and self.routes.owner(header.part) == shard else None

    def _take(self, shard: int, header: Header, payload: memoryview, borrowed: Attached | None) -> None:
        clock, oldest = header.step, header.epoch
        if self.routes.owner(header.part) != shard:
            return
        if borrowed is not None:
            part = self.parts[header.part]
            lying = borrowed.tensor(self._copy_at + self._places[header.part], part.length, part.dtype)
            self.values[header.part].copy_(lying)
        elif header.flags & BLOCKS:
            assert clock - 1 <= self._arrived[header.part] <= clock, (clock, self._arrived[header.part])
            blocks.unpack(payload, self.values[header.part])
        assert self.staleness is None or oldest >= clock - self.staleness, (clock, oldest, self.staleness)
        with self._news:
            self._arrived[header.part] = clock
            if header.part in self._flights:
                self._flights[header.part].land()
            self.stop_at = self.stop_at or header.worker
            if header.part in self._wanted and clock >= self.step:
                self._wanted.remove(header.part)
                if not self._wanted:
                    self._news.notify_all()
