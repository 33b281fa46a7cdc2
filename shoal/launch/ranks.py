"""Processes of ranks on this machine: their events, signals to them, and their end.

Nothing here judges an event. `supervise` decides what follows from it.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from shoal.errors import LaunchError
from shoal.launch.failure import Failure
from shoal.launch.output import LineForwarder
from shoal.launch.private_store import PrivateStore
from shoal.launch.rank_events import RankExited
from shoal.launch.rank_set import RankEvent


class Rank:
    """The process of one rank, as the process that started it sees it.

    Args:
        number: the rank.
        process: already started; it leads a process group of its own.
        report: the pipe from which a Failure or a RankResult comes.
        streams: its outputs, except those that go directly to a terminal or a file.
    """

    def __init__(
        self,
        number: int,
        process: BaseProcess,
        report: Connection,
        streams: Sequence[LineForwarder],
    ) -> None:
        assert process.pid is not None
        self.number = number
        self.process = process
        self.report = report
        self.streams = list(streams)
        self.pid: int = process.pid
        self.is_alive = True

    @property
    def sources(self) -> list[Any]:
        """Return the objects to wait for: the end of the process, its outputs, its report."""
        reports = [] if self.report.closed else [self.report]
        return [self.process.sentinel, *self.streams, *reports]

    def read_events(self, ready: Iterable[Any]) -> list[RankEvent]:
        """Forward the lines that have arrived, and return the events, a RankExited last.

        Args:
            ready: those of `sources` that can be read.
        """
        for source in ready:
            if isinstance(source, LineForwarder) and not source.forward():
                self._close_stream(source)
        events = self._read_reports()
        return [*events, *self._reap()] if self.process.sentinel in ready else events

    def signal(self, number: int) -> None:
        """Send a signal to the rank's own process, not to its children."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def signal_group(self, number: int) -> None:
        """Send a signal to the rank and to all processes that it started."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:  # it has not made its own group yet
            self.signal(number)

    def close(self) -> None:
        """Kill the process if it is alive, wait for its end, and close its pipes."""
        if self.is_alive:
            self.signal_group(signal.SIGKILL)
            self.process.join()
            self.is_alive = False
        for stream in list(self.streams):
            self._close_stream(stream)
        self.report.close()

    def _read_reports(self) -> list[RankEvent]:
        events: list[RankEvent] = []
        with contextlib.suppress(EOFError, ConnectionResetError):
            while not self.report.closed and self.report.poll():
                events.append(self.report.recv())
            return events
        self.report.close()
        return events

    def _reap(self) -> list[RankEvent]:
        """Return the last events of a process that has ended, and close its pipes."""
        self.process.join()
        self.is_alive = False
        self.signal_group(signal.SIGKILL)  # data-loader workers that the rank may have left
        for stream in list(self.streams):
            while wait([stream.source], timeout=0) and stream.forward():
                pass
        events = self._read_reports()
        self.close()
        code = self.process.exitcode
        assert code is not None
        return [*events, RankExited(self.number, code)]

    def _close_stream(self, stream: LineForwarder) -> None:
        self.streams.remove(stream)
        stream.source.close()


class Ranks:
    """All ranks of one world, and their stores. As a context, it kills and closes them all.

    Args:
        store: the process that serves torch's store; None where there is none.
        private: the store in which Shoal's own ranks of one host meet; None where they meet in
            `store`.

    Attributes:
        all: the ranks that were started, by rank.
    """

    def __init__(self, store: BaseProcess | None, private: PrivateStore | None) -> None:
        self.store = store
        self._private = private
        self.all: list[Rank] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def alive(self) -> list[Rank]:
        return [rank for rank in self.all if rank.is_alive]

    def watch(self, timeout_s: float | None, sources: Sequence[Any] = ()) -> list[RankEvent]:
        """Wait for events, forward the lines that were printed, and return the events.

        Args:
            timeout_s: return after this time at the latest; None waits for ever.
            sources: other objects with a `fileno`; return when one of them can be read.

        Raises:
            LaunchError: the store has ended before the ranks.
        """
        alive = self.alive
        rank_sources = [source for rank in alive for source in rank.sources]
        stores = [] if self.store is None else [self.store.sentinel]
        ready = set(wait([*stores, *sources, *rank_sources], timeout_s))
        events: list[RankEvent] = []
        for rank in alive:
            events += rank.read_events(ready.intersection(rank.sources))
        if ready.intersection(stores) and self.alive:
            raise LaunchError(
                "The process that holds the ranks' rendezvous store has ended; see its message "
                "above."
            )
        return events

    def pause(self) -> None:
        """Stop the ranks and this process (Ctrl-Z); continue the ranks when it is continued.

        Ranks have sessions of their own, so the terminal's signal does not reach them.
        """
        for rank in self.alive:
            rank.signal_group(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        for rank in self.alive:
            rank.signal_group(signal.SIGCONT)

    def located(self, failure: Failure) -> Failure:
        """Return the failure itself: there is one host."""
        return failure

    def kill(self) -> None:
        """Kill all processes, and wait for their end."""
        for rank in self.alive:
            rank.signal_group(signal.SIGKILL)
        for rank in self.all:
            rank.close()
        if self.store is not None:
            self.store.kill()
            self.store.join()
        if self._private is not None:
            self._private.close()
