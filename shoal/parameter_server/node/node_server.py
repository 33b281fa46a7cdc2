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
from shoal.parameter_server.codec import (
    BLOCKS,
    FIRST_SERVER,
    MAX_CONTROL_BYTES,
    Op,
    pack_partition,
    unpack,
    unpack_order,
    unpack_part,
)
from shoal.parameter_server.coordinator.coordinator import Address, View
from shoal.parameter_server.coordinator.placement import Placement
from shoal.parameter_server.events import (
    InstallSnapshot,
    InSync,
    NotOwner,
    Outgoing,
    ProtocolViolation,
    ReplicateUpdate,
    TransferDone,
)
from shoal.parameter_server.node.connected_workers import ConnectedWorkers
from shoal.parameter_server.node.membership import Membership
from shoal.parameter_server.node.migration import Migration
from shoal.parameter_server.node.receive_buffers import ReceiveBuffers
from shoal.parameter_server.node.replication import Replication
from shoal.parameter_server.node.shard import Shard
from shoal.parameter_server.node.shared_values import SharedValues
from shoal.parameter_server.partitioning import Partition
from shoal.parameter_server.shard_settings import ShardSettings
from shoal.parameter_server.transport.acceptor import Acceptor
from shoal.parameter_server.transport.connection import QueuedConnection
from shoal.parameter_server.transport.frame import Header
from shoal.parameter_server.transport.secure_channel import SecureChannel
from shoal.parameter_server.transport.settings import Transport

log = logging.getLogger("shoal.server")
_OF_A_STEP = (Op.STEP, Op.NORM, Op.GRADIENT, Op.PULL, Op.LOAD)


@dataclass(frozen=True)
class ServerConfig:
    """All that a server is told when it starts."""

    server: int
    shard: int
    arbiter: Address
    transport: Transport  # its limit fits the parts
    settings: ShardSettings


OnMessage = Callable[[int, QueuedConnection, Header, memoryview, bytes], Iterable[Outgoing]]


class ServerNode:
    """Serves one shard on a listening socket, until it is closed or is a member no longer.

    Args: on_message: takes every message of a worker in place of the method of this name. The lock
        is held.
    """

    def __init__(
        self, plan: ServerConfig, listener: socket.socket, on_message: OnMessage | None = None
    ) -> None:
        self.plan = plan
        self._on_message = on_message or self.on_message
        settings = plan.settings
        self.slots = SharedValues(settings.parts, settings.workers, settings.staleness)
        self.shard = self._new_shard()
        self.inbox, self.audience = (
            ReceiveBuffers(self.shard.parts, settings.compression),
            ConnectedWorkers(),
        )
        self.lock = threading.Lock()
        self.roles = threading.Condition(self.lock)
        self.deferred_replies: list[Outgoing] = []
        self.received_bytes = 0
        self.door = Acceptor(listener, f"server {plan.server}", plan.transport, plan.server)
        self.membership = Membership(
            plan.server,
            plan.shard,
            listener.getsockname()[:2],
            plan.arbiter,
            plan.transport,
            settings.lease_s,
        )
        self.replication = Replication(
            self.shard, self.membership, self.inbox, self.lock, self.send
        )
        self.moving = Migration(
            plan.shard,
            self.shard,
            self.membership,
            self.lock,
            self._free_partition,
            settings.lease_s,
        )

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
        self.door.accept(self._serve_connection)

    def close(self) -> None:
        """Accept nobody any more; `run` returns."""
        self.door.close()

    def _free_partition(self, part: Partition) -> None:
        """What lies here of a part is needed no more."""
        self.inbox.forget(part.number)
        self.slots.discard(part)

    # One connection

    def _serve_connection(self, channel: SecureChannel, number: int) -> None:
        """From its handshake to its end."""
        peer = QueuedConnection(channel, f"peer {number}")
        with self.lock:
            before = self.audience.connect(number, peer)
        if before is not None:
            before.close()
            before.heard.wait()  # what it had still to read would go to the same memory
        try:
            self._wait_for_role(number)
            self._receive_loop(number, peer)
        except ConnectionLost as error:
            log.debug("server %d: %s", self.plan.server, error)
        except (ProtocolViolation, WireError) as error:
            self.door.refuse(error)
            peer.post(Op.REFUSED, str(error).encode()[:MAX_CONTROL_BYTES])
        finally:
            peer.heard.set()
            peer.close(flush=True)
            with self.lock:
                self.audience.disconnect(number, peer)

    def _wait_for_role(self, number: int) -> None:
        """A worker may have heard before this server that it is the primary now."""
        if number >= FIRST_SERVER:
            return
        with self.roles:
            if not self.roles.wait_for(
                lambda: self.membership.is_primary, self.plan.settings.lease_s
            ):
                raise ProtocolViolation(
                    f"server {self.plan.server} is not the primary of shard {self.plan.shard}"
                )

    def _receive_loop(self, number: int, peer: QueuedConnection) -> None:
        before: dict[int, bytes] = {}  # what was said of a payload that comes next
        while True:
            header, payload = peer.receive(lambda header: self.inbox.place(number, header))
            if header.op in (Op.GRAD_MASK, Op.UPDATE_META):
                before[header.partition] = bytes(payload)
                continue
            about = before.pop(header.partition, b"")
            if header.op == Op.TRANSFER:
                self.moving.await_placement(header.epoch)
            with self.lock:
                self.received_bytes += header.length
                if number < FIRST_SERVER:
                    try:
                        self._refuse_strangers(number, header)
                        self.send(self._on_message(number, peer, header, payload, about))
                    except NotOwner as where:
                        peer.post(Op.MOVED, partition=where.part, step=header.op)
                elif header.op == Op.TRANSFER:
                    self.send(self.moving.receive(number, header, payload))
                else:
                    self.replication.apply_from_primary(number, peer, header, payload, about)

    def _refuse_strangers(self, worker: int, header: Header) -> None:
        if not self.membership.is_primary:
            raise ProtocolViolation(
                f"server {self.plan.server} is not the primary of shard {self.plan.shard}"
            )
        if worker not in self.shard.workers and header.op != Op.STATS:
            raise ProtocolViolation(f"worker {worker} is none of {self.shard.workers}")

    def on_message(
        self, worker: int, peer: QueuedConnection, header: Header, payload: memoryview, about: bytes
    ) -> Iterable[Outgoing]:
        """Take a worker's message. Holds the lock. Raises Elsewhere, Refused."""
        if header.op == Op.PUSH:
            return self._push(worker, header, payload, about)
        if header.op in _OF_A_STEP:
            return self._step(worker, header, payload)
        self._answer(worker, peer, header, payload)
        return []

    def _push(
        self, worker: int, header: Header, payload: memoryview, about: bytes
    ) -> Iterable[Outgoing]:
        gradient, present = self.pushed(worker, header, payload, about)
        sparse = bool(header.flags & BLOCKS)
        return self.shard.push(worker, header.step, header.partition, gradient, present, sparse)

    def _step(self, worker: int, header: Header, payload: memoryview) -> Iterable[Outgoing]:
        """Handle what belongs to a step; the shard answers it."""
        shard, step, part = self.shard, header.step, header.partition
        match header.op:
            case Op.STEP:
                ordered = shard.request_step(worker, step, unpack_order(payload))
                self.moving.discard()
                return ordered
            case Op.NORM | Op.GRADIENT:
                return shard.query_gradient(worker, step, part, whole=header.op == Op.GRADIENT)
            case Op.PULL:
                return shard.pull(worker, part)
            case Op.LOAD:
                values, state, _ = unpack_part(payload)
                return shard.load(worker, part, values, list(state), step)
        raise AssertionError(header.op)

    def _answer(
        self, worker: int, peer: QueuedConnection, header: Header, payload: memoryview
    ) -> None:
        """Handle what is answered at once, or not at all."""
        shard, part = self.shard, header.partition
        match header.op:
            case Op.STOP:
                newest = max((order_step for order_step, _ in shard.orders.values()), default=0)
                self.audience.stop_after(
                    newest + 3
                )  # nobody has got that far, so everyone hears of it in time
            case Op.USE_SHARED_MEMORY:
                self._share(worker, peer, payload)
            case Op.STATE:
                held = shard.require_partition(part)
                state_bytes = pack_partition(held.values, list(held.state()), shard.done[part])
                peer.post(Op.STATE, state_bytes, partition=part, step=held.clock)
            case Op.STATS:
                peer.post(Op.STATS, json.dumps(self.figures()).encode(), partition=part)
            case Op.RECORD:
                shard.record()
            case Op.HISTORY:
                peer.post(
                    Op.HISTORY, json.dumps(self._history(unpack(payload))).encode(), partition=part
                )
            case _:
                raise ProtocolViolation(f"message {header.op}, which is not known")

    def pushed(
        self, worker: int, header: Header, payload: memoryview, about: bytes
    ) -> tuple[Tensor, bytes]:
        """A worker's gradient, and which of its segments there are. Raises Elsewhere, Refused."""
        segments = self.shard.require_partition(header.partition).part.segments
        return self.inbox.pushed(worker, header, payload), about or b"\1" * len(segments)

    def _share(self, worker: int, peer: QueuedConnection, payload: memoryview) -> None:
        """A worker of this machine lends its gradients, or takes what was lent to it."""
        description = unpack(payload)
        if not description:
            self.audience.use_shared_memory(worker)
            return
        can_read = self.inbox.attach_worker_memory(worker, description)
        peer.post(
            Op.USE_SHARED_MEMORY,
            json.dumps(self.slots.memory.description if can_read else {}).encode(),
        )

    # What is said

    def send(self, out: Iterable[Outgoing]) -> None:
        """Have everyone told. Holds the lock."""
        for message in out:
            if isinstance(message, (ReplicateUpdate, InstallSnapshot)):
                self.membership.replicate(message)
            elif isinstance(message, InSync):
                self.membership.in_sync(message.backup)
            elif isinstance(message, TransferDone):
                self.membership.report_transfer(message)
            elif self.membership.has_lease:
                self.audience.send(message)
            else:
                self.deferred_replies.append(message)

    # What the arbiter and backups say: a MembershipHandler

    def on_view(self, view: View) -> None:
        """Be what the view says."""
        with self.lock:
            self.roles.notify_all()
            if not self.membership.is_primary:
                return
            self.replication.on_view(view)
        self.replication.link()
        self.moving.send_departing()

    def on_placement(self, placement: Placement) -> None:
        """Answer for the parts that are this shard's now."""
        self.moving.on_placement(placement)

    def on_acknowledged(self, backup: int, part: int, clock: int, filled: bool) -> None:
        """Send the answers that have waited for this backup."""
        self.replication.acknowledged(backup, part, clock, filled)

    def on_removed(self) -> None:
        """Serve nobody any more."""
        self.close()

    def on_lease_renewed(self) -> None:
        """Say what could not be said without a lease, and try again what has failed."""
        self.replication.link()
        self.moving.send_departing()
        if self.deferred_replies:
            with self.lock:
                unsaid, self.deferred_replies = self.deferred_replies, []
                self.send(unsaid)

    def status(self) -> dict[str, Any]:
        """Return what `shoal servers list` says of this server."""
        with self.lock:
            return {"pid": os.getpid(), "host": socket.gethostname(), **self._held_summary()}

    def _held_summary(self) -> dict[str, int]:
        held = [held for part, held in self.shard.held.items() if part in self.shard.owned]
        return {
            "parts": len(held),
            "bytes": sum(each.part.size_bytes for each in held),
            "clock": min((each.clock for each in held), default=0),
        }

    def figures(self) -> dict[str, Any]:
        """Return what this server tells workers of itself."""
        return {
            **self._held_summary(),
            "shard": self.plan.shard,
            "server": self.plan.server,
            "received_bytes": self.received_bytes,
            "sent_bytes": self.audience.sent_bytes,
            "refused": self.door.refused,
            "staleness": dict(self.shard.seen),
        }

    def _history(self, known: dict[str, Any]) -> dict[str, Any]:
        """A piece of what the shard has noted, after what the worker has; all, if that came
        from another server.
        """
        first = int(known["first"]) if known.get("server") == self.plan.server else 0
        history = self.shard.history
        number, events, more = (0, [], False) if history is None else history.chunk(first)
        return {"server": self.plan.server, "first": number, "events": events, "more": more}


def serve(listener: socket.socket, plan: ServerConfig) -> None:
    """A server's whole life, in a process of its own."""
    configure_process()
    ServerNode(plan, listener).run()


def configure_process() -> None:
    """Make this process one that serves: a core for each, and no life without all of its
    threads.
    """
    torch.set_num_threads(1)
    threading.excepthook = (
        _die_with_traceback  # a server that has lost a thread would be waited for
    )


def _die_with_traceback(failure: threading.ExceptHookArgs) -> None:
    traceback.print_exception(failure.exc_value)
    os._exit(1)
