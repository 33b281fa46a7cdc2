"""The interface between what a worker asks for and how it travels.

    Client, Relay ── request ──> WorkerSession ── actions ──> WorkerNetwork ──> shards
          ^── events ── WorkerSession <── messages ───────────────┘

`socket_network.py` has the one with connections; `replayed.py` has one that goes nowhere.
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
        """Is held while the session is used."""
        ...

    def handle(self, event: SessionEvent) -> None:
        """Take an event of the session. The lock is held."""
        ...


class WorkerNetwork(Protocol):
    """Way by which a worker's requests travel."""

    def start(self, owner: SessionOwner) -> None:
        """Connect; returns when it is known which shards there are. Raises ServerLost."""
        ...

    def carry_out(self, actions: Iterable[SessionAction]) -> None:
        """Do what the session has asked for, and give its events to the owner. The lock is held."""
        ...

    def report_speeds(self, bytes_per_s: Mapping[int, float]) -> None:
        """Tell the arbiter how fast each shard takes partitions in."""
        ...

    def close(self, limit_s: float) -> None:
        """Disconnect for good."""
        ...
