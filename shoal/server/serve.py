"""A server's body: sockets and threads around a `Shard`.

      worker ──┐ a thread reads a connection, straight into the memory where the gradient is summed
      worker ──┼──> lock ── Shard ──> a thread for each connection sends what is to be said
      primary ─┘

The lock is held while the shard thinks, never while anything is received or sent.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.comm.compress import Compression
from shoal.comm.memory import Memory
from shoal.errors import ConnectionLost, WireError
from shoal.server import blocks
from shoal.server.arbiter import Address, View
from shoal.server.bundle import Bundle
from shoal.server.channel import Channel
from shoal.server.door import Door
from shoal.server.frame import Header
from shoal.server.inbox import Inbox
from shoal.server.key import Key
from shoal.server.layout import Part, offsets
from shoal.server.membership import Membership
from shoal.server.messages import (
    BLOCKS,
    FIRST_SERVER,
    SHARED,
    SMALL_BYTES,
    Op,
    pack_part,
    unpack,
    unpack_order,
    unpack_part,
    view,
)
from shoal.server.peer import Payload, Peer
from shoal.server.placement import Placement
from shoal.server.recipe import Recipe
from shoal.server.said import (
    Acknowledged,
    Adopted,
    Applied,
    Elsewhere,
    Filled,
    Given,
    Gradient,
    InSync,
    Loaded,
    Norm,
    Out,
    Refused,
    Value,
)
from shoal.server.shard import Shard

log = logging.getLogger("shoal.server")


@dataclass(frozen=True)
class Plan:
    """All that a server is told when it starts."""

    server: int
    shard: int
    parts: tuple[Part, ...]  # of the model
    recipe: Recipe
    workers: int
    staleness: int | None
    arbiter: Address
    lease_s: float
    compression: Compression | None
    job: str
    key: Key
    connections: int = 1  # to another server, used as one


class Server:
    """Serves one shard on a listening socket, until it is closed or is a member no longer."""

    def __init__(self, plan: Plan, listener: socket.socket) -> None:
        self.plan = plan
        self.offsets, length_bytes = offsets(plan.parts)
        slots = 1 if plan.staleness == 0 else 1 + plan.workers  # where values change, everyone has a copy to read
        self.slots = slots
        self.memory = Memory(slots * length_bytes)  # of which only what is held takes room
        self.slot_bytes = length_bytes
        self.shard = Shard(
            plan.parts,
            plan.recipe,
            range(plan.workers),
            plan.staleness,
            mine=(),
            memory=lambda part: self._slot(0, part),
            snapshot=self._snapshot,
        )
        self.inbox = Inbox(self.shard.parts, plan.compression)
        self.sharing: set[int] = set()
        self.lock = threading.Lock()
        self.roles = threading.Condition(self.lock)
        self.peers: dict[int, Peer] = {}
        self.unsaid: list[Out] = []
        self.placement: Placement | None = None
        self.given: dict[int, tuple[int, int, float]] = {}
        self.gone: dict[int, dict[int, int]] = {}
        self.stop_at = 0
        self.received_bytes = self.sent_bytes = 0
        most = max((part.size_bytes for part in plan.parts), default=0)
        self.limit_bytes = 8 * most + SMALL_BYTES  # a part's state holds a few times its numbers
        name = f"server {plan.server}"
        self.door = Door(listener, name, plan.key, f"{plan.job}/{plan.server}", self.limit_bytes)
        self.membership = Membership(
            plan.server,
            plan.shard,
            listener.getsockname()[:2],
            plan.arbiter,
            key=plan.key,
            job=plan.job,
            lease_s=plan.lease_s,
            limit_bytes=self.limit_bytes,
            connections=plan.connections,
            follow=self._follow,
            placed=self._placed,
            facts=self._facts,
            acknowledged=self._acknowledged,
            leased=self._leased,
            out=self.close,
        )

    def run(self) -> None:
        """Accept connections until this server is closed."""
        self.membership.begin()
        self.door.admit(self._attend)

    def close(self) -> None:
        """Accept nobody any more; `run` returns."""
        self.door.close()

    def _slot(self, slot: int, part: Part) -> Tensor:
        return self.memory.tensor(slot * self.slot_bytes + self.offsets[part.number], part.length, part.dtype)

    def _snapshot(self, worker: int, part: int, values: Tensor) -> Tensor:
        return self._slot(1 + worker if self.plan.staleness != 0 else 0, self.shard.held[part].part).copy_(values)

    # One connection

    def _attend(self, channel: Channel | Bundle, number: int) -> None:
        """From its handshake to its end."""
        peer = Peer(channel, f"peer {number}")
        with self.lock:
            before, self.peers[number] = self.peers.get(number), peer
            self.sharing.discard(number)
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
                if self.peers.get(number) is peer:
                    del self.peers[number]
                    self.sharing.discard(number)

    def _await_role(self, number: int) -> None:
        """A worker may have heard before this server that it is the primary now."""
        if number >= FIRST_SERVER:
            return
        with self.roles:
            if not self.roles.wait_for(lambda: self.membership.is_primary, self.plan.lease_s):
                raise Refused(f"server {self.plan.server} is not the primary of shard {self.plan.shard}")

    def _await_placement(self, version: int) -> None:
        """Another server may have heard before this one of what is to move."""
        with self.roles:
            self.roles.wait_for(
                lambda: self.placement is not None and self.placement.version >= version, self.plan.lease_s
            )

    def _converse(self, number: int, peer: Peer) -> None:
        before: dict[int, bytes] = {}  # what was said of a payload that comes next
        while True:
            header, payload = peer.receive(lambda header: self.inbox.place(number, header))
            if header.op in (Op.PRESENT, Op.ABOUT):
                before[header.part] = bytes(payload)
                continue
            about = before.pop(header.part, b"")
            if header.op == Op.GIVE:
                self._await_placement(header.epoch)
            with self.lock:
                self.received_bytes += header.length
                if number < FIRST_SERVER:
                    try:
                        self._send(self._take(number, peer, header, payload, about))
                    except Elsewhere as where:
                        peer.post(Op.MOVED, part=where.part, step=header.op)
                else:
                    self._repeat(number, peer, header, payload, about)

    def _take(self, worker: int, peer: Peer, header: Header, payload: memoryview, about: bytes) -> Iterable[Out]:
        """What a worker says."""
        shard, step, part = self.shard, header.step, header.part
        if not self.membership.is_primary:
            raise Refused(f"server {self.plan.server} is not the primary of shard {self.plan.shard}")
        if worker not in shard.workers and header.op != Op.FIGURES:
            raise Refused(f"worker {worker} is none of {shard.workers}")
        match header.op:
            case Op.PUSH:
                segments = shard.held_part(part).part.segments
                there = about or b"\1" * len(segments)
                gradient = self.inbox.pushed(worker, header, payload)
                return shard.push(worker, step, part, gradient, there, sparse=bool(header.flags & BLOCKS))
            case Op.ORDER:
                ordered = shard.order(worker, step, unpack_order(payload))
                self._discard()
                return ordered
            case Op.NORM | Op.GRADIENT:
                return shard.ask(worker, step, part, whole=header.op == Op.GRADIENT)
            case Op.PULL:
                return shard.pull(worker, part)
            case Op.STOP:
                newest = max((order_step for order_step, _ in shard.orders.values()), default=0)
                self.stop_at = self.stop_at or newest + 3  # nobody has got that far, so everyone hears of it in time
            case Op.SHARE:
                self._share(worker, peer, payload)
            case Op.LOAD:
                values, state, _ = unpack_part(payload)
                return shard.load(worker, part, values, list(state), step)
            case Op.STATE:
                held = shard.held_part(part)
                state_bytes = pack_part(held.values, list(held.state()), shard.done[part])
                peer.post(Op.STATE, state_bytes, part=part, step=held.clock)
            case Op.FIGURES:
                peer.post(Op.FIGURES, json.dumps(self._figures()).encode(), part=part)
            case Op.RECORD:
                shard.record()
            case Op.HISTORY:
                peer.post(Op.HISTORY, json.dumps(self._history(unpack(payload))).encode(), part=part)
            case _:
                raise Refused(f"message {header.op}, which is not known")
        return []

    def _share(self, worker: int, peer: Peer, payload: memoryview) -> None:
        """A worker of this machine lends its gradients, or takes what was lent to it."""
        description = unpack(payload)
        if not description:
            self.sharing.add(worker)
            return
        can_read = self.inbox.lend(worker, description)
        peer.post(Op.SHARE, json.dumps(self.memory.description if can_read else {}).encode())

    def _repeat(self, number: int, peer: Peer, header: Header, payload: memoryview, about: bytes) -> None:
        """What a primary says; one that was replaced is refused."""
        part, clock, view = header.part, header.step, self.membership.view
        if header.op == Op.GIVE:  # whether the giver may, the arbiter decides
            values, state, done = unpack_part(payload)
            giver = number - FIRST_SERVER
            if self.membership.is_primary and part in self.shard.parts:
                self._send(self.shard.adopt(Given(part, clock, values, state, done), header.epoch, giver))
            return
        if number - FIRST_SERVER != view.primary and header.epoch <= view.epoch:
            raise Refused(f"epoch {header.epoch} is over; in epoch {view.epoch} the primary is server {view.primary}")
        if header.op == Op.FILL:
            values, state, done = unpack_part(payload)
            out = self.shard.fill(Filled(0, part, clock, values, state, done))
        elif header.op == Op.APPLY:
            found = unpack(memoryview(about))
            gradient = self.inbox.update(number, header)
            present = bytes.fromhex(found["present"])
            out = self.shard.repeat(
                Applied(0, part, clock, found["worker"], found["step"], gradient, present, found["settings"])
            )
        else:
            raise Refused(f"message {header.op} from a server")
        for message in out:
            assert isinstance(message, Acknowledged)
            peer.post(Op.ACKNOWLEDGE, part=message.part, step=message.clock, flags=int(header.op == Op.FILL))

    # What is said

    def _send(self, out: Iterable[Out]) -> None:
        for message in out:
            if isinstance(message, (Applied, Filled)):
                self.membership.tell(message)
            elif isinstance(message, InSync):
                self.membership.in_sync(message.backup)
            elif isinstance(message, Adopted):
                self.membership.holds(message)
            elif self.membership.has_lease:
                self._answer(message)
            else:
                self.unsaid.append(message)

    def _answer(self, message: Out) -> None:
        match message:
            case Value(worker, part, clock, oldest):
                flags, payload = self._packed(message)
                self._to(
                    worker, Op.VALUE, payload, part=part, step=clock, epoch=oldest, worker=self.stop_at, flags=flags
                )
            case Norm(worker, part, squared):
                self._to(worker, Op.NORM, squared.hex().encode(), part=part)
            case Gradient(worker, part, numbers, present):
                self._to(worker, Op.GRADIENT, present + bytes(view(numbers)), part=part)
            case Loaded(worker, part):
                self._to(worker, Op.LOAD, b"", part=part)

    def _packed(self, value: Value) -> tuple[int, Payload]:
        """Values for a worker that reads them here, for one that lacks a few blocks, or whole."""
        if value.worker in self.sharing:
            return SHARED, b""
        if value.changed is not None and blocks.are_few(value.changed):
            return BLOCKS, blocks.pack(value.numbers, value.changed)
        return 0, value.numbers

    def _to(self, number: int, op: Op, payload: Payload, **fields: int) -> None:
        peer = self.peers.get(number)
        if peer is not None:  # one that is gone asks again when it is back
            self.sent_bytes += len(payload) if isinstance(payload, bytes) else payload.numel() * payload.itemsize
            peer.post(op, payload, **fields)

    # What the arbiter and backups say

    def _follow(self, view: View) -> None:
        """Be what the view says."""
        with self.lock:
            self.roles.notify_all()
            if not self.membership.is_primary:
                return
            for backup in set(self.shard.backups) - set(view.members):
                if backup in self.membership.links:
                    self.membership.drop(backup)
                self._send(self.shard.remove_backup(backup))
            for backup in set(view.backups) - set(self.shard.backups):
                self.shard.expect(backup)
        self._link()
        self._give()

    def _placed(self, placement: Placement) -> None:
        """Answer for what is this shard's now, and give what is to go."""
        here = self.plan.shard
        with self.lock:
            self.placement, mine = placement, placement.owned_by(here)
            self.roles.notify_all()
            self.gone |= self.shard.place(mine, mine & set(placement.moving), placement.coming_to(here))
            self._discard()
        self._give()

    def _discard(self) -> None:
        """Give the memory of parts that have gone back to the machine, once nobody can be reading it."""
        for number, done in list(self.gone.items()):
            if number in self.shard.held:  # it has come back
                del self.gone[number]
            elif not self.membership.is_primary or self.shard.has_read(done):
                del self.gone[number]
                part = self.shard.parts[number]
                self.inbox.forget(number)
                for slot in range(self.slots):
                    self.memory.discard(slot * self.slot_bytes + self.offsets[number], part.size_bytes)

    def _give(self) -> None:
        """As the primary, send every part that is away to where it belongs, again if nothing came of it."""
        if self.placement is None or not self.membership.is_primary:
            return
        now, going = time.monotonic(), dict[int, list[int]]()
        for part, move in self.placement.moving.items() if self.shard.away else ():
            if part in self.shard.away and (target := self.membership.primary_of(move.target)) is not None:
                server, since, at = self.given.get(part, (-1, -1, 0.0))
                if (server, since) != (target[0], move.since) or now - at > 2 * self.plan.lease_s:
                    self.given[part] = (target[0], move.since, now)
                    going.setdefault(move.target, []).append(part)
        for shard, parts in going.items():
            threading.Thread(target=self._give_all, args=(shard, parts), daemon=True).start()

    def _give_all(self, shard: int, parts: list[int]) -> None:
        target = self.membership.primary_of(shard)
        peer = None if target is None else self.membership.reach(*target)
        if peer is None:
            return
        for part in parts:
            with self.lock:
                placement, given = self.placement, self.shard.give(part)
                if given is not None and placement is not None and part in placement.moving:
                    self.membership.give(given, placement.moving[part].since, peer)
        peer.close(flush=True)

    def _link(self) -> None:
        """As the primary, have a link to every replica."""
        view = self.membership.view
        for backup in (*view.backups, *view.joining) if self.membership.is_primary else ():
            known = backup in self.membership.links
            peer = None if known else self.membership.reach(backup, view.addresses.get(backup))
            if peer is not None:
                with self.lock:
                    self.membership.link(backup, peer)
                    self._send(self.shard.add_backup(backup, in_sync=backup in view.backups))

    def _acknowledged(self, backup: int, part: int, clock: int, filled: bool) -> None:
        with self.lock:
            self._send(self.shard.acknowledged(backup, part, clock, filled))

    def _leased(self) -> None:
        """A beat was answered."""
        self._link()
        self._give()
        if self.unsaid:
            with self.lock:
                unsaid, self.unsaid = self.unsaid, []
                self._send(unsaid)

    def _facts(self) -> dict[str, Any]:
        """What `shoal servers list` says of it."""
        with self.lock:
            return {"pid": os.getpid(), "host": socket.gethostname(), **self._holds()}

    def _holds(self) -> dict[str, int]:
        held = [held for part, held in self.shard.held.items() if part in self.shard.mine]
        return {
            "parts": len(held),
            "bytes": sum(each.part.size_bytes for each in held),
            "clock": min((each.clock for each in held), default=0),
        }

    def _figures(self) -> dict[str, Any]:
        return {
            **self._holds(),
            "shard": self.plan.shard,
            "server": self.plan.server,
            "received_bytes": self.received_bytes,
            "sent_bytes": self.sent_bytes,
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
