"""Supervision of ranks to their end.

The first failure ends the other ranks, and a signal to this process reaches all of them. So does
the end of a rank that hangs, by what the watchdog says of words, states and the clock.
"""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import inf

from shoal.launch.failure import Failure, from_exit_code, root_cause
from shoal.launch.output import print_line, print_note
from shoal.launch.rank import EXIT_INTERRUPTED, EXIT_RESTART, RankResult
from shoal.launch.rank_set import SECONDS_BETWEEN_LOOKS, RankEvent, RankExited, RankSet
from shoal.watchdog.hang_detector import Hang, find_hang
from shoal.watchdog.progress_word import (
    KINDS,
    PHASE_NAMES,
    RECV,
    SEND,
    SERVERS,
    Phase,
    RankProgress,
)
from shoal.watchdog.progress_writer import now_ns
from shoal.watchdog.straggler_detector import StragglerDetector

# After a lost connection, wait so long for the failure from which it follows.
SECONDARY_FAILURE_S = 1.0
# `timeout`, shells and Slurm may deliver one signal twice; only a later one is a second request.
REPEAT_S = 1.0
KILL_S = 5.0  # from the request to end until a rank is killed
GRACE_S = 60.0
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGTSTP)
EXIT_HANG = 124
"""Exit code of a launcher whose run has ended because of a hang; that of `timeout`."""
CURE = "A rank that is right and only slow needs a longer limit: --hang-limit SECONDS, 0 for none."


@contextmanager
def caught() -> Iterator[socket.socket]:
    """Catch SIGINT, SIGTERM and SIGTSTP while the context lasts. Main thread only.

    A signal that this process was started to ignore (`nohup`) stays ignored.

    Yields:
        A socket that can be read once a signal has arrived; see `arrived`. It can be waited for
        together with pipes and other sockets.
    """
    numbers = [number for number in FORWARDED if signal.getsignal(number) != signal.SIG_IGN]
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.setblocking(False)
        writer.setblocking(False)
        previous = {number: signal.signal(number, lambda *_: None) for number in numbers}
        descriptor = signal.set_wakeup_fd(writer.fileno())
        try:
            yield reader
        finally:
            signal.set_wakeup_fd(descriptor)
            for number, handler in previous.items():
                signal.signal(number, handler)


def arrived(signals: socket.socket) -> bytes:
    """Return the numbers of the signals that have arrived since the last call.

    Python writes every signal that has a handler to the socket, such as a library's SIGCHLD. They
    are left out here.
    """
    try:
        return bytes(number for number in signals.recv(64) if number in FORWARDED)
    except BlockingIOError:
        return b""


def stop_arrived(signals: socket.socket) -> bool:
    """Return whether a SIGINT or SIGTERM is among the signals that `arrived` returns next."""
    try:
        return not {signal.SIGINT, signal.SIGTERM}.isdisjoint(signals.recv(64, socket.MSG_PEEK))
    except BlockingIOError:
        return False


@dataclass
class Supervision:
    """The state of one world from its start to its end. Call `step` until no rank is alive.

    Args:
        ranks: the ranks, running.
        grace_s: time for ranks to save and stop before they are killed. It begins with a SIGTERM,
            or when one of them has ended with EXIT_RESTART.
        ends_siblings: a failure ends the other ranks.

    Attributes:
        codes: exit codes by rank.
        values: pickled return values by rank.
        failures: in the order in which they were observed.
        stop_signal: the first SIGINT or SIGTERM to this process; None before.
    """

    ranks: RankSet
    grace_s: float = GRACE_S
    ends_siblings: bool = True
    codes: dict[int, int] = field(default_factory=dict, init=False)
    values: dict[int, bytes] = field(default_factory=dict, init=False)
    failures: list[Failure] = field(default_factory=list, init=False)
    stop_signal: int | None = field(default=None, init=False)
    # Times on the monotonic clock; inf means "not yet".
    _stop_signal_s: float = field(default=inf, init=False)
    _end_at_s: float = field(default=inf, init=False)
    _kill_at_s: float = field(default=inf, init=False)
    # When we ended the ranks because of a failure: later failures follow from that.
    _ended_s: float = field(default=inf, init=False)
    _sent: set[int] = field(default_factory=set, init=False)  # to the ranks, so that they stop
    _monitor: RankMonitor = field(init=False)

    def __post_init__(self) -> None:
        self._monitor = RankMonitor(self.ranks)

    def step(self, timeout_s: float = inf, sources: Sequence[object] = ()) -> None:
        """Wait for an event, and act on it.

        Args:
            timeout_s: return after this time at the latest.
            sources: other objects with a `fileno`; return when one of them can be read.
        """
        due_s = min(self._end_at_s, self._kill_at_s) - time.monotonic()
        wait_s = min(timeout_s, SECONDS_BETWEEN_LOOKS, due_s)
        for event in self.ranks.watch(max(0.0, wait_s), sources):
            self._on_event(event)
        for failure in self._monitor.poll():
            self._on_failure(failure)
            if self.ends_siblings:  # no signal but SIGKILL ends a rank that hangs in C
                self._ended_s = time.monotonic()
                self._kill_at_s = -inf
        if time.monotonic() >= self._kill_at_s:
            self.ranks.kill()
        elif time.monotonic() >= self._end_at_s:
            self._ended_s = time.monotonic()
            self._end_at_s = inf
            self._kill_at_s = min(self._kill_at_s, self._ended_s + KILL_S)
            for rank in self.ranks.alive:
                rank.signal(signal.SIGTERM)

    def forward(self, number: int) -> None:
        """Act on SIGINT, SIGTERM or SIGTSTP to this process.

        The first SIGINT or SIGTERM goes to the ranks; they are killed after 5 s or `grace_s`. A
        second one, more than `REPEAT_S` later, kills them at once.
        """
        now_s = time.monotonic()
        if number == signal.SIGTSTP:
            self.ranks.pause()
        elif self.stop_signal is None:
            self.stop_signal = number
            self._stop_signal_s = now_s
            self._kill_at_s = now_s + (KILL_S if number == signal.SIGINT else self.grace_s)
            self._send(number)
        elif now_s > self._stop_signal_s + REPEAT_S:
            self._kill_at_s = -inf

    def stop(self) -> None:
        """Make ranks save and end with EXIT_RESTART, without a time limit."""
        self._send(signal.SIGTERM)

    def _send(self, number: int) -> None:
        # After `stop` they have a SIGTERM; a second could kill a rank that has saved and is ending.
        for rank in self.ranks.alive if number not in self._sent else ():
            rank.signal(number)
        self._sent.add(number)

    def exit_code(self) -> int:
        """Return the exit code of ranks that have ended. Print the root cause, if there is one."""
        if self.stop_signal == signal.SIGINT:
            return EXIT_INTERRUPTED
        cause = self.cause
        if cause is not None:
            print(cause.describe(len(self.ranks.all)), file=sys.stderr, flush=True)
            return cause.code
        codes = self.codes.values()
        all_ended = len(codes) == len(self.ranks.all)
        all_saved = all_ended and set(codes) <= {0, EXIT_RESTART} and len(codes) > 0
        if self.stop_signal is not None and not all_saved:
            return 128 + self.stop_signal
        return EXIT_RESTART if EXIT_RESTART in codes else 0

    @property
    def cause(self) -> Failure | None:
        """Return the root cause of the end; None where no failure caused it.

        Ranks that were asked to stop end at different times and may lose each other. Such
        secondary failures do not count.
        """
        failures = self.failures
        if self._sent:
            failures = [failure for failure in failures if not failure.is_secondary]
        return root_cause(failures) if failures else None

    def _on_event(self, event: RankEvent) -> None:
        match event:
            case RankResult(rank, value):
                self.values[rank] = value
            case RankExited(rank, code):
                self.codes[rank] = code
                self._on_exit(rank, code)
            case Failure():
                self._on_failure(event)

    def _on_exit(self, rank: int, code: int) -> None:
        # A shell around the program turns the signal n into the exit code 128 + n.
        is_ours = any(code in (-number, 128 + number) for number in self._sent)
        if code == EXIT_RESTART:
            self._kill_at_s = min(self._kill_at_s, time.monotonic() + self.grace_s)
        elif code != 0 and not is_ours and all(failure.rank != rank for failure in self.failures):
            self._on_failure(from_exit_code(rank, code))

    def _on_failure(self, failure: Failure) -> None:
        if failure.time_s >= self._ended_s:
            return
        host = failure.host or self.ranks.host(failure.rank)
        self.failures.append(replace(failure, host=host))
        if self.ends_siblings:
            delay_s = SECONDARY_FAILURE_S if failure.is_secondary else 0.0
            self._end_at_s = min(self._end_at_s, time.monotonic() + delay_s)


class RankMonitor:
    """Looks at the ranks of one start once a second, and tells of those that hang or are slow.

    The report of a hang says who did not come, in which part of a step, and where its code stands.

    Args:
        source: the progress of the ranks.
    """

    def __init__(self, source: RankSet) -> None:
        self._source = source
        self._stragglers = StragglerDetector()
        self._next_s = 0.0

    def poll(self) -> list[Failure]:
        """Return the failure of a rank that does not come; tell of it, and of slow ranks."""
        limit_s = self._source.hang_limit_s
        if limit_s == 0 or time.monotonic() < self._next_s:
            return []
        self._next_s = time.monotonic() + SECONDS_BETWEEN_LOOKS
        progress = self._source.look()
        for slow in self._stragglers.look(progress):
            print_note(slow.describe(len(self._source.all), self._source.host(slow.rank)))
        hang = find_hang(progress, limit_s)
        if hang is None:
            return []
        headline = self._headline(hang, progress)
        print_line(self._report(hang, headline, progress))
        return [Failure(hang.late, headline, code=EXIT_HANG, is_loss=True)]

    def _headline(self, hang: Hang, progress: Mapping[int, RankProgress]) -> str:
        """Return the rest of a sentence that begins with the late rank. It has no times."""
        late = progress[hang.late]
        if hang.is_deadlock:
            doing = f"waits in {describe_call(late)}, and no rank that it waits for comes"
            if late.word.kind == SERVERS:
                doing = "waits for the parameter servers, which do not answer"
            elif hang.waiter is not None and progress[hang.waiter].word.waits:
                other = describe_call(progress[hang.waiter])
                doing = (
                    f"waits in {describe_call(late)}, and rank {hang.waiter} in {other}, which are "
                    "not the same call. All ranks must make the same calls in the same order: none "
                    "may leave a loop, or call run or a sharded model, by a condition of its own"
                )
            return f"hangs: it {doing}"
        doing = PHASE_NAMES[Phase(late.word.phase)]
        if hang.waiter is None:
            return f"hangs in {doing}"
        call = describe_call(progress[hang.waiter])
        waiter = self._name(hang.waiter)
        return f"did not come: it is in {doing}, while {waiter} waits for it in {call}"

    def _report(self, hang: Hang, headline: str, progress: Mapping[int, RankProgress]) -> str:
        """Return all that is known of a hang: progress of every rank, and two ranks' stacks."""
        lines = [
            f"{self._name(hang.late, f' of {len(self._source.all)}')} {headline}",
            f"No sign of it for {hang.silent_s:.0f} s; the limit is {hang.limit_s:.0f} s. {CURE}",
        ]
        lines += [
            f"  {self._name(rank)}: {describe(each)}" for rank, each in sorted(progress.items())
        ]
        chosen = [hang.late] if hang.waiter is None else [hang.late, hang.waiter]
        return "\n".join([*lines, *map(self._source.stacks, chosen)])

    def _name(self, rank: int, of_world: str = "") -> str:
        host = self._source.host(rank)
        return f"rank {rank}{of_world}{f' on {host}' if host else ''}"


def describe(progress: RankProgress) -> str:
    """Return one line about a rank's word, such as `step 7: the forward pass, for 61 s`."""
    word = progress.word
    silent_s = max(0, now_ns() - word.since_ns) * 1e-9
    phase = PHASE_NAMES[Phase(word.phase)]
    doing = f"waits in {describe_call(progress)}, {phase}" if word.waits else phase
    if not word.waits and word.call:
        doing += f"; its last collective was {describe_call(progress)}"
    return f"step {word.step + 1}: {doing}; unchanged for {silent_s:.0f} s"


def describe_call(progress: RankProgress) -> str:
    """Return the text for the last collective or message that a rank has begun."""
    word = progress.word
    count = f"({word.length:,} numbers)" if word.length else "()"
    if word.kind in (SEND, RECV):
        direction = "to" if word.kind == SEND else "from"
        return f"{KINDS[word.kind]}{count} {direction} rank {word.peer}"
    if word.kind == SERVERS:
        return "a wait for parameter servers"
    if word.kind >= len(KINDS):
        return "no collective yet"
    kind = "a collective that Gloo makes" if KINDS[word.kind] == "gloo" else KINDS[word.kind]
    group = progress.groups.get(word.group)
    ranks = f" of a group of ranks {list(group)}" if group else ""
    return f"{kind}{count} (call {word.call:,}{ranks})"
