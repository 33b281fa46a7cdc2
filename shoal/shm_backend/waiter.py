"""The wait of a rank for other ranks: spin, then sleep, and check that the others are alive.

      0       50 us to 1 ms                                                              time-out
      │ spin  │ sleep until a rank publishes; every 20 ms: are all ranks alive?          │ error

A wake-up takes longer than a small all-reduce, so spinning pays if the others come soon. The spin
time adapts: it doubles after the others came in time, and halves after they did not. If the others
need the processor, or are very late, a rank soon hardly spins.

A waiting rank never yields the processor. On a busy machine, Linux lets a process that yields run
again only after all other processes, but it wakes a sleeping process at once."""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.errors import CollectiveFailed, PeerLost
from shoal.platform.processes import process_state
from shoal.shm_backend.phase_board import PhaseBoard
from shoal.watchdog.progress_writer import own_progress


class PeerLiveness:
    """The processes of other ranks. Any thread may call.

    A pidfd becomes readable when its process has ended, however it ended, so one poll answers for
    all processes without signals or heartbeats.

    Args: pids: processes by rank. They are alive now.
    """

    def __init__(self, pids: Mapping[int, int]) -> None:
        self.pids = pids
        self._poll = select.poll()
        self._lock = threading.Lock()  # two threads cannot poll one object at the same time
        self._ranks: dict[int, int] = {}
        for rank, pid in pids.items():
            # An old kernel has no pidfd: only the time-out of a call reveals a dead process then.
            with contextlib.suppress(OSError, AttributeError):
                descriptor = os.pidfd_open(pid)
                self._ranks[descriptor] = rank
                self._poll.register(descriptor, select.POLLIN)

    def dead(self) -> list[int]:
        """Return the ranks whose processes have ended."""
        with self._lock:
            return [self._ranks[descriptor] for descriptor, _ in self._poll.poll(0)]

    def first_ended(self, ranks: Sequence[int], limit_s: float) -> int | None:
        """Wait up to `limit_s` for one of these processes to end; return its rank, None if none.

        The connections of a process close a moment before the kernel reports its end.
        """
        end_s = time.monotonic() + limit_s
        while True:
            ended = [rank for rank in self.dead() if rank in ranks]
            if ended or not ranks or time.monotonic() > end_s:
                return next(iter(ended), None)
            time.sleep(1e-3)

    def state(self, rank: int) -> str:
        """Return the state of a process as the end of a sentence, such as "is alive"."""
        letter = process_state(self.pids[rank])
        if letter is None:
            return "has ended"
        return {"T": "is stopped (SIGSTOP)", "t": "is stopped by a debugger", "Z": "has ended"}.get(
            letter, "is alive"
        )

    def close(self) -> None:
        """Close the descriptors. No rank is reported dead afterwards."""
        with self._lock:
            for descriptor in self._ranks:
                os.close(descriptor)
            self._ranks.clear()
            self._poll = select.poll()


SPIN_S = 1e-3
SHORT_SPIN_S = 50e-6
HEALTH_EVERY_S = 20e-3

Condition = Callable[[Any], bool]


class Waiter:
    """Waits for conditions of a phase board. A condition's argument is a phase or (phase, rank).

    Args:
        board: the phase board.
        peers: the processes of the other ranks.
        timeout_s: returns the group's present timeout in seconds, for each wait.
        spin_s: the longest spin before a sleep; 0 if there are more ranks than cores.

    Attributes: spin_limit_s: of the next spin.
    """

    def __init__(
        self,
        board: PhaseBoard,
        peers: PeerLiveness,
        timeout_s: Callable[[], float],
        spin_s: float = SPIN_S,
    ) -> None:
        self.board = board
        self.peers = peers
        self.timeout_s = timeout_s
        self.spin_limit_s = self._longest_spin_s = spin_s
        self._leave_at_s = math.inf
        self._progress = own_progress()

    def set_deadline(self, grace_s: float) -> None:
        """Let all waits fail after `grace_s` from now, because this rank leaves its group."""
        self._leave_at_s = time.monotonic() + grace_s

    def until(self, condition: Condition, phase: Any, opts: Any = None) -> None:
        """Wait until `condition(phase)` is true.

        Args: opts: torch's options of the call; their timeout replaces the group's.

        Raises: PeerLost: a rank that is waited for has ended or given up. CollectiveFailed: the
            time-out has passed.
        """
        start_s = time.perf_counter()
        is_there = self._spin(condition, phase)
        self._progress.add_waited(int((time.perf_counter() - start_s) * 1e9))
        if not is_there:
            with self._progress.waiting():
                self.until_without_spinning(condition, phase, opts)

    def poll_for(self, condition: Condition, phase: Any, limit_s: float) -> bool:
        """Spin, then sleep for up to `limit_s`. Return True if the condition became true."""
        start_s = time.perf_counter()
        try:
            if self._spin(condition, phase):
                return True
            end_s = time.perf_counter() + limit_s
            while not condition(phase):
                remaining_s = end_s - time.perf_counter()
                if remaining_s <= 0:
                    return False
                self._sleep(phase, remaining_s)
            return True
        finally:
            self._progress.add_waited(int((time.perf_counter() - start_s) * 1e9))

    def _sleep(self, phase: Any, limit_s: float) -> None:
        if isinstance(phase, int):
            self.board.sleep(phase, limit_s)
        else:
            self.board.sleep(phase[0], limit_s, phase[1])

    def _spin(self, condition: Condition, phase: Any) -> bool:
        """Spin until the condition is true; return False at the limit."""
        longest_s = self._longest_spin_s
        end_s = time.perf_counter() + self.spin_limit_s
        while not condition(phase):
            if time.perf_counter() > end_s:
                self.spin_limit_s = max(self.spin_limit_s / 2, min(SHORT_SPIN_S, longest_s))
                return False
        self.spin_limit_s = min(2 * self.spin_limit_s, longest_s)
        return True

    def until_without_spinning(self, condition: Condition, phase: Any, opts: Any = None) -> None:
        """Wait like `until`, but asleep from the beginning."""
        start_s = time.monotonic()
        limit_s = self._limit_s(opts)
        check_at_s = start_s + HEALTH_EVERY_S
        try:
            while not condition(phase):
                self._sleep(phase, HEALTH_EVERY_S)
                now_s = time.monotonic()
                # A sleep also ends when one of several late ranks has come. The system is asked
                # about the processes only when the time has passed.
                is_due = now_s >= check_at_s or self.board.failure() is not None
                if is_due and not condition(phase):
                    check_at_s = now_s + HEALTH_EVERY_S
                    self._check_health(condition, phase)
                    if now_s > self._leave_at_s:
                        call = self.board.call.describe()
                        raise CollectiveFailed(
                            f"this rank left its group before {call} was complete."
                        )
                    if now_s > start_s + limit_s and not condition(phase):
                        raise CollectiveFailed(self._timeout_text(phase, limit_s))
        finally:
            self._progress.add_waited(int((time.monotonic() - start_s) * 1e9))

    def _check_health(self, condition: Condition, phase: Any) -> None:
        """Raise PeerLost if a rank has given up, or a late rank has ended."""
        board = self.board
        failure, dead = board.failure(), self.peers.dead()
        # Look again: a rank may have published this phase just before its end.
        if condition(phase):
            return
        doing = f"while rank {board.names[board.rank]} waited for it in {board.call.describe()}"
        if failure is not None:
            rank, text = failure
            raise PeerLost(f"rank {board.names[rank]} gave up {doing}: {text}")
        late = self._late_ranks(phase)
        if lost := [rank for rank in dead if rank in late]:
            rank = lost[0]
            raise PeerLost(
                f"rank {board.names[rank]} (process {self.peers.pids[rank]}) has ended {doing} "
                f"(call {board.calls} of a group of ranks {board.names})."
            )

    def _late_ranks(self, phase: Any) -> list[int]:
        return self.board.not_arrived(phase) if isinstance(phase, int) else [phase[1]]

    def _limit_s(self, opts: Any) -> float:
        """Return the timeout of a call, or the group's if the call has none (torch: below 0)."""
        own_s = 0.0 if opts is None else opts.timeout.total_seconds()
        return float(own_s) if own_s > 0 else self.timeout_s()

    def _timeout_text(self, phase: Any, limit_s: float) -> str:
        """Return the error text for a time-out, which names the late ranks."""
        board = self.board
        late = [
            f"rank {board.names[rank]} (process {self.peers.pids[rank]}), which "
            f"{self.peers.state(rank)} and has made {board.calls_of(rank)} calls"
            for rank in self._late_ranks(phase)
        ]
        return (
            f"rank {board.names[board.rank]} waited {limit_s:g} s in "
            f"{board.call.describe()} (call {board.calls} of a group of ranks {board.names}) for "
            f"{', '.join(late) or 'others'}. Every rank must make the same calls; a rank that "
            "computes for longer needs a longer timeout in init_process_group."
        )
