"""Processes of ranks on this machine: their events, signals to them, and their end.

Nothing here judges an event. `supervise` decides what follows from it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from shoal.errors import LaunchError
from shoal.launch.failure import Failure, end_of_process
from shoal.launch.output import LineForwarder
from shoal.launch.private_memory import PrivateMemory
from shoal.launch.rank import STACKS_SIGNAL
from shoal.launch.rank_set import RankEvent, RankExited, RankSet
from shoal.platform.processes import PROC, process_state
from shoal.watchdog.hang_detector import SilenceCounter
from shoal.watchdog.progress_word import ProgressMemory, RankProgress
from shoal.watchdog.progress_writer import now_ns

UNKNOWN_CODE = 255
"""Exit code that multiprocessing gives to a process whose fork server has ended, among others."""
END_S = 0.5
STACK_LIMIT_S = 1.0
STATES = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "in the kernel (disk?)"}
OUTER_FRAMES = ("<frozen runpy>", "shoal/launch/rank.py", "/multiprocessing/", '"<string>"')


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


class Ranks(RankSet):
    """All ranks of one world on this host, and their stores.

    Args:
        store: the process that serves torch's store; None where there is none.
        private: the store in which Shoal's own ranks of one host meet; None where they meet in
            `store`.
        progress: the memory of the ranks' progress words.
        hang_limit_s: as in RankSet.
    """

    def __init__(
        self,
        store: BaseProcess | None,
        private: PrivateMemory | None,
        progress: ProgressMemory,
        hang_limit_s: float,
    ) -> None:
        self.store = store
        self._private = private
        self.progress = progress
        self.hang_limit_s = hang_limit_s
        self.all: list[Rank] = []
        self._silence = SilenceCounter()

    def watch(self, timeout_s: float | None, sources: Sequence[Any] = ()) -> list[RankEvent]:
        alive = self.alive
        rank_sources = [source for rank in alive for source in rank.sources]
        stores = [] if self.store is None else [self.store.sentinel]
        ready = set(wait([*stores, *sources, *rank_sources], timeout_s))
        events: list[RankEvent] = []
        for rank in alive:
            events += rank.read_events(ready.intersection(rank.sources))
        if any(isinstance(event, RankExited) and event.code == UNKNOWN_CODE for event in events):
            events = [*self._lost_fork_server(alive[0].number), *events]
        if ready.intersection(stores) and self.alive:
            assert self.store is not None
            self.store.join()
            raise LaunchError(
                f"The process {self.store.pid}, which holds the ranks' rendezvous store, "
                f"{end_of_process(self.store.exitcode or 0)}. All ranks are ended; start the same "
                "command again."
            )
        return events

    def pause(self) -> None:
        # Ranks have sessions of their own, so the terminal's signal does not reach them.
        for rank in self.alive:
            rank.signal_group(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        for rank in self.alive:
            rank.signal_group(signal.SIGCONT)

    def _lost_fork_server(self, rank: int) -> list[RankEvent]:
        """Return the failure of the fork server, once it has ended. Nothing can start any more."""
        pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        end, limit_s = None, time.monotonic() + END_S
        # Its pipes close a moment before the kernel reports its end. Its owner reaps it.
        while end is None and time.monotonic() < limit_s:
            time.sleep(0.01)
            end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if end is None:
            return []
        is_killed = end.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
        headline = end_of_process(-end.si_status if is_killed else end.si_status)
        name = f"the fork server (process {pid}), from which ranks are started,"
        return [Failure(rank, headline, is_loss=True, process=name, time_s=0.0)]

    def look(self) -> dict[int, RankProgress]:
        pages = {rank.number: self.progress.read(rank.number) for rank in self.alive}
        progress = {rank: each for rank, each in pages.items() if each is not None}
        states = [process_state(rank.pid) for rank in self.alive]
        # One is in a debugger, or all are stopped by a signal.
        is_paused = "t" in states or all(state == "T" for state in states)
        return self._silence.look(progress, now_ns() * 1e-9, is_paused)

    def stacks(self, rank: int) -> str:
        """Return the stacks of a rank's threads.

        Ranks write them into memory of this process when they get STACKS_SIGNAL, also while they
        sleep or are in C with the interpreter locked. A stopped process writes nothing.
        """
        handle = next((each for each in self.alive if each.number == rank), None)
        if handle is None:
            return f"rank {rank} has ended."
        self.progress.clear_stacks()
        handle.signal(STACKS_SIGNAL)
        text, limit_s = "", time.monotonic() + STACK_LIMIT_S
        while time.monotonic() < limit_s:
            time.sleep(0.05)
            before, text = text, self.progress.stacks()
            if text and text == before:
                break
        pid = handle.pid
        state = STATES.get(process_state(pid) or "", "alive")
        where = f"process {pid}, {state}{_kernel_place(pid)}"
        if not text:
            return f"rank {rank} ({where}) has not written its stack."
        lines = text.rstrip().splitlines()
        own = [line for line in lines if not any(part in line for part in OUTER_FRAMES)]
        return "\n".join([f"The stack of rank {rank} ({where}):", *own])

    def kill(self) -> None:
        for rank in self.alive:
            rank.signal_group(signal.SIGKILL)
        for rank in self.all:
            rank.close()
        if self.store is not None:
            self.store.kill()
            self.store.join()
        if self._private is not None:
            self._private.close()
        self.progress.close()


def _kernel_place(pid: int) -> str:
    with contextlib.suppress(OSError):
        place = (PROC / str(pid) / "wchan").read_text().strip()
        return f", in the kernel's {place}" if place not in ("", "0") else ""
    return ""
