"""The interface between a worker's session and the network that carries its messages.

    client ── request ──> WorkerSession ── actions ──> WorkerNetwork ──> shards
      ^── events ── WorkerSession <── messages ───────────────┘

`socket_network.py` implements it with connections, `recorded_order.py` in this process.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Protocol

from shoal.parameter_server.worker.session import WorkerSession
from shoal.parameter_server.worker.worker_messages import SessionAction, SessionEvent


class SessionOwner(Protocol):
    """Owner of a session, which makes its requests."""

    session: WorkerSession

    @property
    def lock(self) -> threading.Lock | threading.Condition:
        """Return the lock that is held while the session is used."""
        ...

    def handle(self, event: SessionEvent) -> None:
        """Handle an event of the session. The lock is held."""
        ...


class WorkerNetwork(Protocol):
    """Network that carries out the actions of a session."""

    def start(self, owner: SessionOwner) -> None:
        """Connect, and return when the shards are known. Raises ServerLost."""
        ...

    def carry_out(self, actions: Iterable[SessionAction]) -> None:
        """Carry out a session's actions and pass its events to the owner. The lock is held."""
        ...

    def report_speeds(self, bytes_per_s: Mapping[int, float]) -> None:
        """Report to the coordinator how fast each shard receives partitions."""
        ...

    def close(self, limit_s: float) -> None:
        """Disconnect for good."""
        ...
