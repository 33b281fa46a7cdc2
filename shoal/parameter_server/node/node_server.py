"""One server's process: the sockets and threads around a `Shard`.

      worker ──┐ one thread reads each connection, gradients straight into `server_memory.py`
      worker ──┼──> lock ── Shard ──> one thread sends on each connection: `worker_requests.py`
      primary ─┘              └ workers of this host can read its values: `server_memory.py`

      coordinator ──> `membership.py` ──> updates to backups, or from a primary: `replication.py`
                                     └──> partitions to and from other shards: `migration.py`

The lock is held while the shard computes, never while anything is received or sent.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import threading
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError

from shoal.comm.compression import parse
from shoal.errors import ConnectionLost, UsageError, WireError
from shoal.parameter_server.cluster_config import ShardSettings
from shoal.parameter_server.codec import FIRST_SERVER, MAX_CONTROL_BYTES, Op
from shoal.parameter_server.coordinator.coordinator import Address, View
from shoal.parameter_server.events import (
    InstallSnapshot,
    InSync,
    NotOwner,
    Outgoing,
    ProtocolViolation,
    ReplicateUpdate,
    TransferDone,
)
from shoal.parameter_server.node.membership import Membership
from shoal.parameter_server.node.migration import Migration
from shoal.parameter_server.node.replication import Replication
from shoal.parameter_server.node.server_memory import ReceiveBuffers, SharedValues
from shoal.parameter_server.node.shard import Shard
from shoal.parameter_server.node.worker_requests import WorkerRequests
from shoal.parameter_server.transport.acceptor import Acceptor
from shoal.parameter_server.transport.connection import Connection, Header
from shoal.parameter_server.transport.settings import Transport, address_of
from shoal.platform.processes import set_process_name
from shoal.platform.torch_private import DYNAMO

UNREADABLE = (UsageError, SafetensorError, LookupError, TypeError, ValueError)
"""Errors of a message that its sender has made otherwise."""
log = logging.getLogger("shoal.server")


@dataclass(frozen=True)
class ServerConfig:
    """Settings of one server's process.

    Args:
        server: the server's number, unique in the job.
        shard: the shard that it holds a replica of.
        coordinator: the address where the coordinator listens.
        transport: settings of the job, with a limit that fits the partitions.
    """

    server: int
    shard: int
    coordinator: Address
    transport: Transport
    settings: ShardSettings


class ServerNode:
    """Serves a replica of one shard on a listening socket, as long as it is a member.

    Attributes:
        deferred_replies: answers to workers that wait for a lease.
    """

    def __init__(self, config: ServerConfig, listener: socket.socket) -> None:
        settings = config.settings
        self.config = config
        self.shared_values = SharedValues(settings.parts, settings.workers, settings.staleness)
        self.shard = Shard(
            settings.parts,
            settings.recipe,
            range(settings.workers),
            settings.staleness,
            owned=(),  # until the placement says what
            memory=self.shared_values.values,
            snapshot=self.shared_values.copy,
        )
        self.buffers = ReceiveBuffers(self.shard.parts, parse(settings.compress))
        # One lock around the pure shard: a thread holds it for one event and until the answers
        # are queued, so that they leave in the order of the events.
        self.lock = threading.Lock()
        self._view_changed = threading.Condition(self.lock)
        self.deferred_replies: list[Outgoing] = []
        self.received_bytes = 0
        self.acceptor = Acceptor(
            listener,
            f"the server of shard {config.shard} (process {os.getpid()})",
            config.transport,
            config.server,
        )
        self.membership = Membership(config, address_of(listener), self)
        self.replication = Replication(self)
        self.migration = Migration(self)
        self.workers = WorkerRequests(self)

    def run(self) -> None:
        """Accept connections until this server is removed from its shard."""
        self.membership.start()
        self.acceptor.accept(self._serve_connection)

    # One connection

    def _serve_connection(self, peer: Connection, number: int) -> None:
        """Serve a peer from its handshake to the end of its connection.

        Args:
            number: a worker's number, or FIRST_SERVER and a server's.
        """
        with self.lock:
            previous = self.workers.connect(number, peer)
        if previous is not None:
            previous.close()
            # What its reader has still to read would go to the same buffers.
            previous.reader_done.wait()
        try:
            if number < FIRST_SERVER:
                # A worker may learn of this server's role before the server does.
                with self._view_changed:
                    lease_s = self.config.settings.lease_s
                    self._view_changed.wait_for(lambda: self.membership.is_primary, lease_s)
                    self._check_primary()
            self._receive_loop(number, peer)
        except ConnectionLost as error:
            log.debug("server %d: %s", self.config.server, error)
        except (ProtocolViolation, WireError, *UNREADABLE) as error:
            self.acceptor.refuse(error)
            peer.post(Op.REFUSED, str(error).encode()[:MAX_CONTROL_BYTES])
        finally:
            peer.reader_done.set()
            peer.close(flush=True)
            with self.lock:
                self.workers.disconnect(number, peer)

    def _receive_loop(self, number: int, peer: Connection) -> None:
        metas: dict[int, bytes] = {}  # partition -> frame that describes the next payload of it
        while True:
            header, payload = peer.receive(lambda header: self.buffers.buffer_for(number, header))
            if header.op in (Op.GRAD_MASK, Op.UPDATE_META):
                metas[header.partition] = bytes(payload)
                continue
            meta = metas.pop(header.partition, b"")
            if header.op == Op.TRANSFER:
                self.migration.await_placement(header.epoch)
            with self.lock:
                self.received_bytes += header.length
                if number < FIRST_SERVER:
                    self._on_worker_frame(number, peer, header, payload, meta)
                elif header.op == Op.TRANSFER:
                    self.send(self.migration.receive(number, header, payload))
                else:
                    self.replication.apply_from_primary(number, peer, header, payload, meta)

    def _on_worker_frame(
        self, worker: int, peer: Connection, header: Header, payload: memoryview, meta: bytes
    ) -> None:
        try:
            self._check_primary()
            # Anyone with the key may ask for figures.
            if worker not in self.shard.workers and header.op != Op.STATS:
                raise ProtocolViolation(f"worker {worker} is none of {self.shard.workers}")
            self.send(self.workers.handle(worker, peer, header, payload, meta))
        except NotOwner as error:
            # The worker sends the request again, to the owner that the placement names.
            peer.post(Op.MOVED, partition=error.part, step=header.op)

    def _check_primary(self) -> None:
        if not self.membership.is_primary:
            raise ProtocolViolation(
                f"server {self.config.server} is not the primary of shard {self.config.shard}"
            )

    def send(self, messages: Iterable[Outgoing]) -> None:
        """Send each message to its receiver. The caller holds the lock."""
        for message in messages:
            if isinstance(message, (ReplicateUpdate, InstallSnapshot)):
                self.replication.replicate(message)
            elif isinstance(message, InSync):
                self.membership.report_in_sync(message.backup)
            elif isinstance(message, TransferDone):
                self.membership.report_transfer(message)
            elif self.membership.has_lease:
                self.workers.send(message)
            else:
                # Another server may be the primary by now: an answer could contradict its own.
                self.deferred_replies.append(message)

    # Callbacks of the membership, in its threads

    def on_view(self, view: View) -> None:
        """Take the role that the view gives this server."""
        with self.lock:
            self._view_changed.notify_all()
            if not self.membership.is_primary:
                return
            self.replication.on_view(view)
        self.replication.connect_backups()
        self.migration.send_departing()

    def on_lease_renewed(self) -> None:
        """Send the answers that have waited for a lease, and retry what has failed."""
        self.replication.connect_backups()
        self.migration.send_departing()
        if self.deferred_replies:
            with self.lock:
                replies, self.deferred_replies = self.deferred_replies, []
                self.send(replies)

    def status(self) -> dict[str, Any]:
        """Return this server's columns of `shoal servers list`."""
        with self.lock:
            return {"pid": os.getpid(), "host": socket.gethostname(), "clock": self._clock()}

    # Figures

    def _clock(self) -> int:
        """Return the steps that all partitions include which this server answers for."""
        shard = self.shard
        clocks = (state.clock for number, state in shard.held.items() if number in shard.owned)
        return min(clocks, default=0)

    def figures(self) -> dict[str, Any]:
        """Return this server's figures for the report at the end of a run. The lock is held."""
        return {
            "clock": self._clock(),
            "shard": self.config.shard,
            "server": self.config.server,
            "received_bytes": self.received_bytes,
            "sent_bytes": self.workers.sent_bytes,
            "refused": self.acceptor.refused,
            "staleness": dict(self.shard.staleness_counts),
        }


def serve(listener: socket.socket, config: ServerConfig) -> None:
    """Run a server in a process of its own, from its start to its end."""
    torch.set_num_threads(1)
    set_process_name(f"shoal server {config.shard}")
    # A server that has lost a thread would stay silent, and its peers would wait for it.
    threading.excepthook = _exit_with_traceback
    # The first optimizer would import it, under the lock of heartbeats, and outlast the lease.
    importlib.import_module(DYNAMO)
    ServerNode(config, listener).run()


def _exit_with_traceback(failure: threading.ExceptHookArgs) -> None:
    traceback.print_exception(failure.exc_value)
    os._exit(1)
