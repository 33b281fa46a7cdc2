"""Ranks that run on this machine: listened to, signalled and ended, without a judgement of what
they do.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from shoal.errors import LaunchError
from shoal.launch.failure import Failure
from shoal.launch.output import LineForwarder
from shoal.launch.rank import RankResult


@dataclass(frozen=True)
class RankExited:
    """A rank's process is gone; a negative code is the signal that killed it."""

    rank: int
    code: int


RankEvent = RankExited | Failure | RankResult


class Rank:
    """One rank's process, seen from the process that started it.

    Args:
        process: already started; it leads a process group of its own.
        report: what it tells us.
        streams: what it prints, where that is not a terminal or a file of ours.
    """

    def __init__(
        self,
        number: int,
        process: BaseProcess,
        report: Connection,
        streams: Sequence[LineForwarder],
    ) -> None:
        assert process.pid is not None
        self.number, self.process, self.report, self.streams = (
            number,
            process,
            report,
            list(streams),
        )
        self.pid: int = process.pid
        self.is_alive = True

    @property
    def sources(self) -> list[Any]:
        """What can be waited for."""
        return [
            self.process.sentinel,
            *self.streams,
            *([] if self.report.closed else [self.report]),
        ]

    def attend(self, ready: Iterable[Any]) -> list[RankEvent]:
        """Take what has arrived: lines are handed on, reports are returned, and so is its end,
        last of all.
        """
        for source in ready:
            if isinstance(source, LineForwarder) and not source.forward():
                self._close(source)
        news = self._read()
        return [*news, *self._reap()] if self.process.sentinel in ready else news

    def signal(self, number: int) -> None:
        """Send a signal to the rank's own process, not to its children."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def signal_group(self, number: int) -> None:
        """Send a signal to the rank and to all that it started."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:  # it has not made its own group yet
            self.signal(number)

    def close(self) -> None:
        """Kill it if it lives, wait until it is gone, and let go of its pipes."""
        if self.is_alive:
            self.signal_group(signal.SIGKILL)
            self.process.join()
            self.is_alive = False
        for stream in list(self.streams):
            self._close(stream)
        self.report.close()

    def _read(self) -> list[RankEvent]:
        news: list[RankEvent] = []
        with contextlib.suppress(EOFError, ConnectionResetError):
            while not self.report.closed and self.report.poll():
                news.append(self.report.recv())
            return news
        self.report.close()
        return news

    def _reap(self) -> list[RankEvent]:
        self.process.join()
        self.is_alive = False
        self.signal_group(signal.SIGKILL)  # its data-loader workers, if it left any
        for stream in list(self.streams):
            while wait([stream.source], timeout=0) and stream.forward():
                pass
        news = self._read()
        self.close()
        code = self.process.exitcode
        assert code is not None
        return [*news, RankExited(self.number, code)]

    def _close(self, stream: LineForwarder) -> None:
        self.streams.remove(stream)
        stream.source.close()


class Ranks:
    """All ranks of one world, and the process that holds their store. As a context, it kills what
    is left at its end.

    Args:
        store: the process that holds the rendezvous store.
    """

    def __init__(self, store: BaseProcess) -> None:
        self.store = store
        self.all: list[Rank] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def alive(self) -> list[Rank]:
        return [rank for rank in self.all if rank.is_alive]

    def watch(self, timeout_s: float | None, also: Sequence[Any] = ()) -> list[RankEvent]:
        """Wait until something happens, hand on the lines that were printed, and return what was
        reported.

        Args:
            timeout_s: returns after so long even if nothing happened; None waits for ever.
            also: other objects with a `fileno`; returns when one of them can be read.

        Raises:
            LaunchError: the store is gone while ranks live.
        """
        living = self.alive
        sources = [source for rank in living for source in rank.sources]
        ready = set(wait([self.store.sentinel, *also, *sources], timeout_s))
        news = [item for rank in living for item in rank.attend(ready.intersection(rank.sources))]
        if self.store.sentinel in ready and self.alive:
            raise LaunchError(
                "The process that holds the ranks' rendezvous store has ended; see its message "
                "above."
            )
        return news

    def kill(self) -> None:
        """End everything at once, and wait until it is gone."""
        for rank in self.alive:
            rank.signal_group(signal.SIGKILL)
        for rank in self.all:
            rank.close()
        self.store.kill()
        self.store.join()
