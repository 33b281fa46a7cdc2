"""How a rank waits for the others: it spins briefly, then sleeps until it is woken, and looks after
their health.

      0       50 us to 1 ms                                                              time-out
      │ spin  │ sleep until somebody publishes; every 20 ms: is everybody alive?         │ error

To be woken takes longer than an all-reduce, so it spins for longer where this has paid: twice as
long after others came in time, half as long after they did not. Where others need the processor, or
are late by far, it soon hardly spins.

It never yields: on a busy machine Linux gives a process that yields its turn back only after
everybody else's, while one that sleeps is woken at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from shoal.errors import CollectiveFailed, PeerLost
from shoal.shm_backend.liveness import PeerLiveness
from shoal.shm_backend.phase_board import PhaseBoard

SPIN_S = 1e-3
SHORT_SPIN_S = 50e-6
HEALTH_EVERY_S = 20e-3

Condition = Callable[[Any], bool]


class AdaptiveSpin:
    """How long it pays to spin.

    Attributes:
        limit_s: for the next time.
    """

    def __init__(self, most_s: float) -> None:
        self.limit_s = self._most_s = most_s
        self._least_s = min(SHORT_SPIN_S, most_s)

    def on_hit(self) -> None:
        """What was waited for came while this rank was spinning."""
        self.limit_s = min(2 * self.limit_s, self._most_s)

    def on_miss(self) -> None:
        """It did not."""
        self.limit_s = max(self.limit_s / 2, self._least_s)


class Waiter:
    """Waits until others have come, or raises.

    Args:
        spin_s: how long to look before sleeping, at most; 0 where there are more ranks than cores.
        timeout_s: for each meeting.
    """

    def __init__(
        self, board: PhaseBoard, peers: PeerLiveness, timeout_s: float, spin_s: float = SPIN_S
    ) -> None:
        self.board, self.peers, self.timeout_s = board, peers, timeout_s
        self.spins = AdaptiveSpin(spin_s)
        self._leave_at = math.inf

    def set_deadline(self, grace_s: float) -> None:
        """Whoever waits is to give up then."""
        self._leave_at = time.monotonic() + grace_s

    def until(self, condition: Condition, phase: Any) -> None:
        """Returns when `condition(phase)` is true.

        Raises: PeerLost, CollectiveFailed: it will never be, or was not within the time-out.
        """
        if not self._spinning(condition, phase):
            self.until_without_spinning(condition, phase)

    def poll_for(self, condition: Condition, phase: Any, limit_s: float) -> bool:
        """Whether the condition comes true within a moment: while spinning, or so long after
        that.
        """
        if self._spinning(condition, phase):
            return True
        end = time.perf_counter() + limit_s
        while not condition(phase):
            left_s = end - time.perf_counter()
            if left_s <= 0:
                return False
            self._sleep(phase, left_s)
        return True

    def _sleep(self, phase: Any, limit_s: float) -> None:
        number, rank = (phase, None) if isinstance(phase, int) else phase
        self.board.sleep(number, limit_s, rank)

    def _spinning(self, condition: Condition, phase: Any) -> bool:
        end = time.perf_counter() + self.spins.limit_s
        while not condition(phase):
            if time.perf_counter() > end:
                self.spins.on_miss()
                return False
        self.spins.on_hit()
        return True

    def until_without_spinning(self, condition: Condition, phase: Any) -> None:
        """As `until`, without computing."""
        begin = time.monotonic()
        end, check_at = begin + self.timeout_s, begin + HEALTH_EVERY_S
        while not condition(phase):
            self._sleep(phase, HEALTH_EVERY_S)
            now = time.monotonic()
            # One of several others may have come, which is no reason to ask the system after all of
            # them.
            if (now >= check_at or self.board.failure() is not None) and not condition(phase):
                check_at = now + HEALTH_EVERY_S
                self._check_health(condition, phase)
                if now > self._leave_at:
                    raise CollectiveFailed(
                        f"this rank left its group before {self.board.call.describe()} was "
                        "complete."
                    )
                if now > end and not condition(phase):
                    raise CollectiveFailed(self._stragglers(phase))

    def _check_health(self, condition: Condition, phase: Any) -> None:
        board = self.board
        failure, dead = board.failure(), self.peers.dead()
        if condition(phase):  # it had come before it died
            return
        doing = f"while rank {board.names[board.rank]} waited for it in {board.call.describe()}"
        if failure is not None:
            rank, text = failure
            raise PeerLost(f"rank {board.names[rank]} gave up {doing}: {text}")
        late = self._late(phase)
        if lost := [rank for rank in dead if rank in late]:
            rank = lost[0]
            raise PeerLost(
                f"rank {board.names[rank]} (process {self.peers.pids[rank]}) has ended {doing} "
                f"(call {board.calls} of a group of ranks {board.names})."
            )

    def _late(self, phase: Any) -> list[int]:
        return self.board.not_arrived(phase) if isinstance(phase, int) else [phase[1]]

    def _stragglers(self, phase: Any) -> str:
        board = self.board
        late = [
            f"rank {board.names[rank]} (process {self.peers.pids[rank]}), which "
            f"{self.peers.state(rank)} and has "
            f"made {board.calls_of(rank)} calls"
            for rank in self._late(phase)
        ]
        return (
            f"rank {board.names[board.rank]} waited {self.timeout_s:g} s in "
            f"{board.call.describe()} "
            f"(call {board.calls} of a group of ranks {board.names}) for "
            f"{', '.join(late) or 'others'}. "
            "Every rank must make the same calls; a rank that computes for longer needs a longer "
            "timeout= in "
            "init_process_group."
        )
