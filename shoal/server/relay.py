"""One machine's workers as one worker: their gradients are summed here, and one pull serves all of them.

      machine 0    worker 0 ┐ shared                                         machine 1
                   worker 1 ┴ memory ── relay ══ push, pull ══ server          relay ── worker 2
                                         adds up            ╚═════════════════════┘ └── worker 3

To its workers a relay is a server that holds everything; to the servers it is a worker that never computes. So the
bytes between machines do not grow with the workers of a machine. Synchronous steps only. A sum is made machine by
machine: it is as reproducible as ever, and rounds in another place.
"""

from __future__ import annotations

import json
import queue
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from shoal.comm.memory import Attached, Memory
from shoal.server.arbiter import Address
from shoal.server.client import Client
from shoal.server.frame import Header
from shoal.server.layout import offsets
from shoal.server.messages import Op, unpack_part
from shoal.server.peer import Peer
from shoal.server.said import Gradient, Norm, Order, Out, Refused
from shoal.server.serve import Plan, Server, settle
from shoal.server.shard import Shard
from shoal.server.summing import Question, Sum
from shoal.server.transport_settings import Transport


@dataclass(frozen=True)
class Behind:
    """The servers behind a relay.

    Args:
        arbiter: theirs.
        transport: settings of their job.
        worker: the relay's number among all relays.
        loads: whether it is this one that gives the servers their first numbers.
        shares: whether servers of this machine read the sums from its memory.
    """

    arbiter: Address
    transport: Transport
    worker: int
    loads: bool
    shares: bool


class Onward(NamedTuple):
    """The sum of a part, for the servers."""

    part: int
    total: Tensor
    present: bytes
    sparse: bool


class AskOnward(NamedTuple):
    """What workers ask of the sum over all machines."""

    part: int
    whole: bool


class OrderOnward(NamedTuple):
    """A step, when every worker here has ordered it and every sum is on its way."""

    order: Order


class RelayShard(Shard):
    """Adds up what the workers of a machine push, and steps nothing.

    Args: lend: a part's memory for the sum.
    """

    def __init__(self, *arguments: Any, lend: Callable[[int], Tensor], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.lend = lend
        self.step = 0
        self.sent: dict[int, int] = {}

    def load(self, worker: int, part: int, values: Tensor, state: list[Mapping[str, Any]], clock: int) -> list[Out]:
        self.step = clock
        return super().load(worker, part, values, [{}] * len(state), clock)

    def ask(self, worker: int, step: int, part: int, whole: bool) -> list[Any]:
        self.held_part(part)
        self.asked.append(Question(worker, step, part, whole))
        return self._go_on()

    def arrived(self, part: int, clock: int) -> list[Out]:
        """The servers' values of a part have come, to where it lies."""
        self.held[part].clock = clock
        self._count(part, -1, clock - 1)
        self.sums[part] = Sum(self.lend(part))
        answers = [out for worker in self.workers for out in self._read(worker, part)]
        return self.backups.hold(part, clock, answers)

    def _begin(self, part: int, done: Mapping[int, int]) -> None:
        super()._begin(part, done)
        self.sums[part] = Sum(self.lend(part))

    def _told(self, part: int) -> list[Out]:
        return []  # the servers know

    def _step_together(self, part: int) -> list[Any]:
        sum_, step = self.sums[part], self.held[part].clock
        onward = []
        if len(sum_.added) == len(self.workers) and self.sent.get(part) != step:
            self.sent[part] = step
            onward.append(Onward(part, sum_.total(), sum_.present, sum_.sparse))
        return [*onward, *self._go_on()]

    def _go_on(self) -> list[Any]:
        """Questions and the order, once the sums of all parts are on their way: none of them may hold up a sum."""
        if any(self.sent.get(part) != self.step for part in self.mine):
            return []
        ready = [question for question in self.asked if question.step == self.step]
        self.asked = [question for question in self.asked if question.step != self.step]
        out: list[Any] = [(AskOnward(question.part, question.whole), question.worker) for question in ready]
        if all(self.orders.get(worker, (-1,))[0] == self.step for worker in self.workers):
            out.append(OrderOnward(self.orders[self.workers[0]][1]))
            self.step += 1
        return out


class _Memory:
    """What a client has to know of memory: where values are to lie, and where gradients are lent from."""

    def __init__(self, values: list[Tensor], lent: Memory, lent_at: list[int]) -> None:
        self.values, self.lent, self.lent_at = values, lent, lent_at


class _Upstream(Client):
    """A client that says when values have come."""

    came: Callable[[int, int], None]

    def _take(self, shard: int, header: Header, payload: memoryview, borrowed: Attached | None) -> None:
        super()._take(shard, header, payload, borrowed)
        if self._arrived[header.part] == header.step:
            self.came(header.part, header.step)


class Relay(Server):
    """Serves the workers of one machine."""

    shard: RelayShard

    def __init__(self, plan: Plan, behind: Behind, listener: socket.socket) -> None:
        places, size_bytes = offsets(plan.settings.parts)
        self.sums, self.sums_at = Memory(size_bytes), [places[part.number] for part in plan.settings.parts]
        super().__init__(plan, listener)
        self.behind = behind
        memory: Any = _Memory([self.slots.values(part) for part in plan.settings.parts], self.sums, self.sums_at)
        self.upstream = _Upstream(
            behind.worker,
            plan.settings.parts,
            behind.arbiter,
            memory,
            transport=behind.transport,
            shares=behind.shares,
        )
        self.upstream.came = self._came
        self.onward: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def _new_shard(self) -> RelayShard:
        settings = self.plan.settings
        places = zip(self.sums_at, settings.parts, strict=True)
        sums = [self.sums.tensor(at, part.length, part.dtype) for at, part in places]
        return RelayShard(
            settings.parts,
            settings.recipe,
            range(settings.workers),
            mine=(),
            memory=self.slots.values,
            lend=lambda part: sums[part],
        )

    def run(self) -> None:
        """Until the workers' arbiter has let this server go."""
        threading.Thread(target=self._pass_on, name="onward", daemon=True).start()
        super().run()
        self.onward.put(None)
        self.upstream.close()

    def _pass_on(self) -> None:
        while (task := self.onward.get()) is not None:
            task()

    def _came(self, part: int, clock: int) -> None:
        with self.lock:
            self._send(self.shard.arrived(part, clock))

    def _send(self, out: Iterable[Any]) -> None:
        rest: list[Out] = []
        for message in out:
            match message:
                case Onward(part, total, present, sparse):
                    self._later(self.upstream.push, part, total, present, sparse)
                case OrderOnward(order):
                    self._later(self.upstream.order, order)
                case (AskOnward(part, whole), worker):
                    self._later(self._ask_onward, worker, part, whole)
                case _:
                    rest.append(message)
        super()._send(rest)

    def _later(self, call: Callable[..., None], *arguments: Any) -> None:
        self.onward.put(lambda: call(*arguments))

    def _ask_onward(self, worker: int, part: int, whole: bool) -> None:
        if whole:
            answer: Out = Gradient(worker, part, *self.upstream.gradient(part))
        else:
            answer = Norm(worker, part, self.upstream.squared_norm_of(part))
        with self.lock:
            super()._send([answer])

    def _take(self, worker: int, peer: Peer, header: Header, payload: memoryview, about: bytes) -> Iterable[Out]:
        """What a worker says: most of it as to any server, what only the servers know is asked there."""
        part, step = header.part, header.step
        match header.op:
            case Op.LOAD:
                self._later(self._load, worker, part, step, bytes(payload))
            case Op.STATE:
                self._later(self._tell_state, peer, part)
            case Op.FIGURES:
                self._later(self._tell_figures, peer, part)
            case Op.PULL | Op.STOP:
                raise Refused(f"message {header.op} to a relay, which takes synchronous steps only")
            case _:
                return super()._take(worker, peer, header, payload, about)
        return []

    def _load(self, worker: int, part: int, step: int, payload: bytes) -> None:
        self.upstream.step = step
        if self.behind.loads:
            self.upstream.load_part(part, payload)
        self.upstream.begin()
        values, state, _ = unpack_part(memoryview(payload))
        with self.lock:
            super()._send(self.shard.load(worker, part, values, list(state), step))

    def _tell_state(self, peer: Peer, part: int) -> None:
        peer.post(Op.STATE, self.upstream.packed_state(part), part=part)

    def _tell_figures(self, peer: Peer, part: int) -> None:
        figures = {**self._figures(), "behind": self.upstream.figures()}
        peer.post(Op.FIGURES, json.dumps(figures).encode(), part=part)


def relay(listener: socket.socket, plan: Plan, behind: Behind) -> None:
    """A relay's whole life, in a process of its own."""
    settle()
    Relay(plan, behind, listener).run()
