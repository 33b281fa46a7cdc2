"""A server's body: sockets and threads around a `Shard`.

      worker ──┐ a thread reads a connection, straight into the memory where the gradient is summed: `inbox.py`
      worker ──┼──> lock ── Shard ──> a thread for each connection sends what is to be said: `audience.py`
      primary ─┘              └ its values lie where workers of this machine can read them: `slots.py`

      arbiter ──> `membership.py` ──> whom this server tells of its updates, or whose it repeats: `replication.py`
                                 └──> which parts it gives to another shard, or gets: `moving.py`

The lock is held while the shard thinks, never while anything is received or sent.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ConnectionLost, WireError
from shoal.server.arbiter import Address, View
from shoal.server.audience import Audience
from shoal.server.channel import Channel
from shoal.server.door import Door
from shoal.server.frame import Header
from shoal.server.inbox import Inbox
from shoal.server.layout import Part
from shoal.server.membership import Membership
from shoal.server.messages import BLOCKS, FIRST_SERVER, SMALL_BYTES, Op, pack_part, unpack, unpack_order, unpack_part
from shoal.server.moving import Moving
from shoal.server.peer import Peer
from shoal.server.placement import Placement
from shoal.server.replication import Replication
from shoal.server.said import Adopted, Applied, Elsewhere, Filled, InSync, Out, Refused
from shoal.server.shard import Shard
from shoal.server.shard_settings import ShardSettings
from shoal.server.slots import Slots
from shoal.server.transport_settings import Transport

log = logging.getLogger("shoal.server")
_OF_A_STEP = (Op.ORDER, Op.NORM, Op.GRADIENT, Op.PULL, Op.LOAD)


@dataclass(frozen=True)
class Plan:
    """All that a server is told when it starts."""

    server: int
    shard: int
    arbiter: Address
    transport: Transport  # its limit fits the parts
    settings: ShardSettings


OnMessage = Callable[[int, Peer, Header, memoryview, bytes], Iterable[Out]]


class Server:
    """Serves one shard on a listening socket, until it is closed or is a member no longer.

    Args: on_message: takes every message of a worker in place of the method of this name. The lock
        is held.
    """

    def __init__(self, plan: Plan, listener: socket.socket, on_message: OnMessage | None = None) -> None:
        self.plan = plan
        self._on_message = on_message or self.on_message
        settings = plan.settings
        self.slots = Slots(settings.parts, settings.workers, settings.staleness)
        self.shard = self._new_shard()
        self.inbox, self.audience = Inbox(self.shard.parts, settings.compression), Audience()
        self.lock = threading.Lock()
        self.roles = threading.Condition(self.lock)
        self.unsaid: list[Out] = []
        self.received_bytes = 0
        self.door = Door(listener, f"server {plan.server}", plan.transport, plan.server)
        self.membership = Membership(
            plan.server,
            plan.shard,
            listener.getsockname()[:2],
            plan.arbiter,
            plan.transport,
            settings.lease_s,
        )
        self.replication = Replication(self.shard, self.membership, self.inbox, self.lock, self.send)
        self.moving = Moving(plan.shard, self.shard, self.membership, self.lock, self._free, settings.lease_s)

    def _new_shard(self) -> Shard:
        """What thinks here; it is made once, when there are slots and nothing else."""
        settings = self.plan.settings
        return Shard(
            settings.parts,
            settings.recipe,
            range(settings.workers),
            settings.staleness,
            mine=(),
            memory=self.slots.values,
            snapshot=self.slots.copy,
        )

    def run(self) -> None:
        """Accept connections until this server is closed."""
        self.membership.begin(self)
        self.door.admit(self._attend)

    def close(self) -> None:
        """Accept nobody any more; `run` returns."""
        self.door.close()

    def _free(self, part: Part) -> None:
        """What lies here of a part is needed no more."""
        self.inbox.forget(part.number)
        self.slots.discard(part)

    # One connection

    def _attend(self, channel: Channel, number: int) -> None:
        """From its handshake to its end."""
        peer = Peer(channel, f"peer {number}")
        with self.lock:
            before = self.audience.enter(number, peer)
        if before is not None:
            before.close()
            before.heard.wait()  # what it had still to read would go to the same memory
        try:
            self._await_role(number)
            self._converse(number, peer)
        except ConnectionLost as error:
            log.debug("server %d: %s", self.plan.server, error)
        except (Refused, WireError) as error:
            self.door.refuse(error)
            peer.post(Op.REFUSED, str(error).encode()[:SMALL_BYTES])
        finally:
            peer.heard.set()
            peer.close(flush=True)
            with self.lock:
                self.audience.leave(number, peer)

    def _await_role(self, number: int) -> None:
        """A worker may have heard before this server that it is the primary now."""
        if number >= FIRST_SERVER:
            return
        with self.roles:
            if not self.roles.wait_for(lambda: self.membership.is_primary, self.plan.settings.lease_s):
                raise Refused(f"server {self.plan.server} is not the primary of shard {self.plan.shard}")

    def _converse(self, number: int, peer: Peer) -> None:
        before: dict[int, bytes] = {}  # what was said of a payload that comes next
        while True:
            header, payload = peer.receive(lambda header: self.inbox.place(number, header))
            if header.op in (Op.PRESENT, Op.ABOUT):
                before[header.part] = bytes(payload)
                continue
            about = before.pop(header.part, b"")
            if header.op == Op.GIVE:
                self.moving.await_placement(header.epoch)
            with self.lock:
                self.received_bytes += header.length
                if number < FIRST_SERVER:
                    try:
                        self._refuse_strangers(number, header)
                        self.send(self._on_message(number, peer, header, payload, about))
                    except Elsewhere as where:
                        peer.post(Op.MOVED, part=where.part, step=header.op)
                elif header.op == Op.GIVE:
                    self.send(self.moving.take_in(number, header, payload))
                else:
                    self.replication.repeat(number, peer, header, payload, about)

    def _refuse_strangers(self, worker: int, header: Header) -> None:
        if not self.membership.is_primary:
            raise Refused(f"server {self.plan.server} is not the primary of shard {self.plan.shard}")
        if worker not in self.shard.workers and header.op != Op.FIGURES:
            raise Refused(f"worker {worker} is none of {self.shard.workers}")

    def on_message(self, worker: int, peer: Peer, header: Header, payload: memoryview, about: bytes) -> Iterable[Out]:
        """Take a worker's message. Holds the lock. Raises Elsewhere, Refused."""
        if header.op == Op.PUSH:
            return self._push(worker, header, payload, about)
        if header.op in _OF_A_STEP:
            return self._step(worker, header, payload)
        self._answer(worker, peer, header, payload)
        return []

    def _push(self, worker: int, header: Header, payload: memoryview, about: bytes) -> Iterable[Out]:
        gradient, present = self.pushed(worker, header, payload, about)
        sparse = bool(header.flags & BLOCKS)
        return self.shard.push(worker, header.step, header.part, gradient, present, sparse)

    def _step(self, worker: int, header: Header, payload: memoryview) -> Iterable[Out]:
        """Handle what belongs to a step; the shard answers it."""
        shard, step, part = self.shard, header.step, header.part
        match header.op:
            case Op.ORDER:
                ordered = shard.order(worker, step, unpack_order(payload))
                self.moving.discard()
                return ordered
            case Op.NORM | Op.GRADIENT:
                return shard.ask(worker, step, part, whole=header.op == Op.GRADIENT)
            case Op.PULL:
                return shard.pull(worker, part)
            case Op.LOAD:
                values, state, _ = unpack_part(payload)
                return shard.load(worker, part, values, list(state), step)
        raise AssertionError(header.op)

    def _answer(self, worker: int, peer: Peer, header: Header, payload: memoryview) -> None:
        """Handle what is answered at once, or not at all."""
        shard, part = self.shard, header.part
        match header.op:
            case Op.STOP:
                newest = max((order_step for order_step, _ in shard.orders.values()), default=0)
                self.audience.stop_after(newest + 3)  # nobody has got that far, so everyone hears of it in time
            case Op.SHARE:
                self._share(worker, peer, payload)
            case Op.STATE:
                held = shard.held_part(part)
                state_bytes = pack_part(held.values, list(held.state()), shard.done[part])
                peer.post(Op.STATE, state_bytes, part=part, step=held.clock)
            case Op.FIGURES:
                peer.post(Op.FIGURES, json.dumps(self.figures()).encode(), part=part)
            case Op.RECORD:
                shard.record()
            case Op.HISTORY:
                peer.post(Op.HISTORY, json.dumps(self._history(unpack(payload))).encode(), part=part)
            case _:
                raise Refused(f"message {header.op}, which is not known")

    def pushed(self, worker: int, header: Header, payload: memoryview, about: bytes) -> tuple[Tensor, bytes]:
        """A worker's gradient, and which of its segments there are. Raises Elsewhere, Refused."""
        segments = self.shard.held_part(header.part).part.segments
        return self.inbox.pushed(worker, header, payload), about or b"\1" * len(segments)

    def _share(self, worker: int, peer: Peer, payload: memoryview) -> None:
        """A worker of this machine lends its gradients, or takes what was lent to it."""
        description = unpack(payload)
        if not description:
            self.audience.shares(worker)
            return
        can_read = self.inbox.lend(worker, description)
        peer.post(Op.SHARE, json.dumps(self.slots.memory.description if can_read else {}).encode())

    # What is said

    def send(self, out: Iterable[Out]) -> None:
        """Have everyone told. Holds the lock."""
        for message in out:
            if isinstance(message, (Applied, Filled)):
                self.membership.tell(message)
            elif isinstance(message, InSync):
                self.membership.in_sync(message.backup)
            elif isinstance(message, Adopted):
                self.membership.holds(message)
            elif self.membership.has_lease:
                self.audience.tell(message)
            else:
                self.unsaid.append(message)

    # What the arbiter and backups say: a MembershipHandler

    def on_view(self, view: View) -> None:
        """Be what the view says."""
        with self.lock:
            self.roles.notify_all()
            if not self.membership.is_primary:
                return
            self.replication.follow(view)
        self.replication.link()
        self.moving.give()

    def on_placement(self, placement: Placement) -> None:
        """Answer for the parts that are this shard's now."""
        self.moving.placed(placement)

    def on_acknowledged(self, backup: int, part: int, clock: int, filled: bool) -> None:
        """Send the answers that have waited for this backup."""
        self.replication.acknowledged(backup, part, clock, filled)

    def on_removed(self) -> None:
        """Serve nobody any more."""
        self.close()

    def on_lease_renewed(self) -> None:
        """Say what could not be said without a lease, and try again what has failed."""
        self.replication.link()
        self.moving.give()
        if self.unsaid:
            with self.lock:
                unsaid, self.unsaid = self.unsaid, []
                self.send(unsaid)

    def status(self) -> dict[str, Any]:
        """Return what `shoal servers list` says of this server."""
        with self.lock:
            return {"pid": os.getpid(), "host": socket.gethostname(), **self._holds()}

    def _holds(self) -> dict[str, int]:
        held = [held for part, held in self.shard.held.items() if part in self.shard.mine]
        return {
            "parts": len(held),
            "bytes": sum(each.part.size_bytes for each in held),
            "clock": min((each.clock for each in held), default=0),
        }

    def figures(self) -> dict[str, Any]:
        """Return what this server tells workers of itself."""
        return {
            **self._holds(),
            "shard": self.plan.shard,
            "server": self.plan.server,
            "received_bytes": self.received_bytes,
            "sent_bytes": self.audience.sent_bytes,
            "refused": self.door.refused,
            "staleness": dict(self.shard.seen),
        }

    def _history(self, known: dict[str, Any]) -> dict[str, Any]:
        """A piece of what the shard has noted, after what the worker has; all, if that came from another server."""
        first = int(known["first"]) if known.get("server") == self.plan.server else 0
        history = self.shard.history
        number, events, more = (0, [], False) if history is None else history.piece(first)
        return {"server": self.plan.server, "first": number, "events": events, "more": more}


def serve(listener: socket.socket, plan: Plan) -> None:
    """A server's whole life, in a process of its own."""
    settle()
    Server(plan, listener).run()


def settle() -> None:
    """Make this process one that serves: a core for each, and no life without all of its threads."""
    torch.set_num_threads(1)
    threading.excepthook = _end  # a server that has lost a thread would be waited for


def _end(failure: threading.ExceptHookArgs) -> None:
    traceback.print_exception(failure.exc_value)
    os._exit(1)
