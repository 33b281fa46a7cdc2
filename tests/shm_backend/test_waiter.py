"""The wait of a rank: the limit of its spin, and when it checks that the others are alive."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
from in_process_ranks import meet

from shoal.errors import PeerLost
from shoal.shm_backend.phase_board import CallSignature
from shoal.shm_backend.waiter import HEALTH_EVERY_S, SHORT_SPIN_S, SPIN_S, PeerLiveness, Waiter


@pytest.mark.parametrize(("longest_s", "shortest_s"), [(SPIN_S, SHORT_SPIN_S), (0.0, 0.0)])
def test_spins_grow_after_a_hit_and_shrink_after_a_miss(
    monkeypatch: pytest.MonkeyPatch, longest_s: float, shortest_s: float
) -> None:
    waiter = _WaitingRank(monkeypatch, ranks=2, spin_s=longest_s).waiter
    for _ in range(20):
        waiter._spin(lambda _: False, 1)
    assert waiter.spin_limit_s == shortest_s
    for _ in range(20):
        waiter._spin(lambda _: True, 1)
    assert waiter.spin_limit_s == longest_s


def test_a_rank_spins_for_less_after_the_others_came_late(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = _WaitingRank(monkeypatch, ranks=2)
    waiting.while_asleep(lambda: waiting.ranks[1].publish())
    waiting.waiter.until(waiting.board.all_reached, 1)
    assert waiting.waiter.spin_limit_s == SPIN_S / 2


def test_ranks_that_come_one_by_one_cause_no_health_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting = _WaitingRank(monkeypatch, ranks=4)
    waiting.while_asleep(*[other.publish for other in waiting.ranks[1:]])
    waiting.waiter.until_without_spinning(waiting.board.all_reached, 1)
    assert waiting.asked == 0


def test_a_long_sleep_checks_the_health_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting = _WaitingRank(monkeypatch, ranks=2)
    waiting.while_asleep(*[lambda: waiting.pass_by(HEALTH_EVERY_S)] * 5, waiting.ranks[1].publish)
    waiting.waiter.until_without_spinning(waiting.board.all_reached, 1)
    assert waiting.asked == 5


def test_a_rank_that_gives_up_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = _WaitingRank(monkeypatch, ranks=3)
    waiting.while_asleep(waiting.ranks[1].publish, lambda: waiting.ranks[2].fail("out of memory"))
    with pytest.raises(
        PeerLost, match=r"rank 2 gave up while rank 0 waited for it in barrier.*out of memory"
    ):
        waiting.waiter.until_without_spinning(waiting.board.all_reached, 1)


class _WaitingRank:
    """The first of several ranks in one process, which waits. The test moves its clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int, spin_s: float = SPIN_S) -> None:
        self.ranks = meet(ranks)
        call = CallSignature("barrier")
        for board in self.ranks:
            board.begin(call, call.encoded)
        self.board = self.ranks[0]
        self.asked = 0
        self.now_s = 0.0
        self.patch = monkeypatch
        peers = PeerLiveness({0: os.getpid()})
        monkeypatch.setattr("shoal.shm_backend.waiter.time.monotonic", lambda: self.now_s)
        monkeypatch.setattr(peers, "dead", self._dead)
        peers.close()
        self.waiter = Waiter(self.board, peers, timeout_s=lambda: 60.0, spin_s=spin_s)

    def while_asleep(self, *events: Callable[[], object]) -> None:
        """Make one of `events` happen in each sleep."""
        remaining = iter(events)
        self.patch.setattr(self.board, "sleep", lambda *_: next(remaining)())

    def pass_by(self, time_s: float) -> None:
        self.now_s += time_s

    def _dead(self) -> list[int]:
        self.asked += 1
        return []


def test_threads_may_ask_at_the_same_time() -> None:
    peers, errors = PeerLiveness({0: os.getpid()}), list[BaseException]()
    end = time.monotonic() + 0.3

    def ask() -> None:
        try:
            while time.monotonic() < end:
                assert peers.dead() == []
        except BaseException as error:  # noqa: BLE001 - whatever it is
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    peers.close()
    assert not errors


def test_who_has_ended_is_told() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    peers = PeerLiveness({0: os.getpid(), 1: process.pid})
    assert peers.dead() == []
    process.kill()
    process.communicate()
    assert peers.dead() == [1]
    assert peers.state(1) == "has ended"
    peers.close()
    assert peers.dead() == []
