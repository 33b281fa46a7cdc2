"""Watching ranks until all have ended: the first failure ends the others, a signal from outside
reaches all of them.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from shoal.launch.failure import Failure, from_exit_code, root_cause
from shoal.launch.rank import EXIT_RESTART, RankResult
from shoal.launch.ranks import RankEvent, RankExited, Ranks
from shoal.launch.sigstop_detector import POLL_S, SigstopDetector

SECONDARY_FAILURE_S = (
    1.0  # how long a lost connection waits for the failure that it is the consequence of
)
# `timeout`, shells and Slurm may deliver one signal twice; only a later one is a second wish
REPEAT_S = 1.0
KILL_S = 5.0  # how long a rank has between being told to end and being killed


@dataclass
class Supervision:
    """The state of one world between its start and its end.

    Args: ranks: running. grace_s: how long ranks may take to save and stop, after a SIGTERM or
        after one of them has asked to be run
            again, before they are killed.
        ends_siblings: whether a failure ends the other ranks.
    """

    ranks: Ranks
    grace_s: float
    ends_siblings: bool = True
    codes: dict[int, int] = field(default_factory=dict, init=False)
    values: dict[int, bytes] = field(default_factory=dict, init=False)
    failures: list[Failure] = field(default_factory=list, init=False)
    asked: int | None = field(default=None, init=False)  # the first signal from outside
    asked_s: float = field(default=inf, init=False)
    stopping: bool = field(default=False, init=False)  # we have told them ourselves
    ended_s: float = field(default=inf, init=False)  # since when what ranks report is our own doing
    end_at_s: float = field(default=inf, init=False)
    kill_at_s: float = field(default=inf, init=False)
    stopped: SigstopDetector = field(default_factory=SigstopDetector, init=False)

    def step(self, timeout_s: float = inf, also: Sequence[object] = ()) -> None:
        """Wait for news, for one of `also` or until something is due, and act on it."""
        wait_s = min(timeout_s, POLL_S, min(self.end_at_s, self.kill_at_s) - time.monotonic())
        for news in self.ranks.watch(max(0.0, wait_s), also):
            self._handle_event(news)
        for failure in self.stopped.poll(self.ranks.alive):
            self._judge(failure)
        if time.monotonic() >= self.kill_at_s:
            self.ranks.kill()
        elif time.monotonic() >= self.end_at_s:
            self._end_all()

    def forward(self, number: int) -> None:
        """Act on a signal that this process got: SIGINT, SIGTERM or SIGTSTP."""
        if number == signal.SIGTSTP:
            self._pause()
        elif self.asked is None:
            self.asked, self.asked_s = number, time.monotonic()
            self.kill_at_s = self.asked_s + (KILL_S if number == signal.SIGINT else self.grace_s)
            if self.stopping and number == signal.SIGTERM:
                return  # they know; a second signal could meet a rank that has saved and is ending
            for rank in self.ranks.alive:
                rank.signal(number)
        elif time.monotonic() > self.asked_s + REPEAT_S:
            self.kill_at_s = -inf

    def stop(self) -> None:
        """Have ranks save and end with EXIT_RESTART, however long that takes."""
        self.stopping = True
        for rank in self.ranks.alive:
            rank.signal(signal.SIGTERM)

    @property
    def cause(self) -> Failure | None:
        """What began the end, if that was a failure; ranks that are told to stop may lose each
        other.
        """
        failures = [
            failure
            for failure in self.failures
            if not (self._signals_sent and failure.is_secondary)
        ]
        return root_cause(failures) if failures else None

    @property
    def _signals_sent(self) -> set[int]:
        """The signals that ranks have from us because they are to stop."""
        return {
            *([] if self.asked is None else [self.asked]),
            *([signal.SIGTERM] if self.stopping else []),
        }

    def _handle_event(self, news: RankEvent) -> None:
        match news:
            case RankResult(rank, value):
                self.values[rank] = value
            case RankExited(rank, code):
                self.codes[rank] = code
                self._judge_end(rank, code)
            case Failure():
                self._judge(news)

    def _judge_end(self, rank: int, code: int) -> None:
        is_ours = any(code in (-number, 128 + number) for number in self._signals_sent)
        if code == EXIT_RESTART:
            self.kill_at_s = min(self.kill_at_s, time.monotonic() + self.grace_s)
        elif code != 0 and not is_ours and all(failure.rank != rank for failure in self.failures):
            self._judge(from_exit_code(rank, code))

    def _judge(self, failure: Failure) -> None:
        if failure.time_s >= self.ended_s:
            return
        self.failures.append(failure)
        if self.ends_siblings:
            self.end_at_s = min(
                self.end_at_s,
                time.monotonic() + (SECONDARY_FAILURE_S if failure.is_secondary else 0.0),
            )

    def _end_all(self) -> None:
        self.ended_s, self.end_at_s = time.monotonic(), inf
        self.kill_at_s = min(self.kill_at_s, self.ended_s + KILL_S)
        for rank in self.ranks.alive:
            rank.signal(signal.SIGTERM)

    def _pause(self) -> None:
        """Ctrl-Z stops this process; ranks are not in its group and stop and go on with it."""
        for rank in self.ranks.alive:
            rank.signal_group(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        for rank in self.ranks.alive:
            rank.signal_group(signal.SIGCONT)
