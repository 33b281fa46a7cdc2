"""How a rank waits: for how long it spins, and when it looks after the others."""

import os
from collections.abc import Callable

import pytest

from shoal.errors import PeerLost
from shoal.shm_backend.call import CallSignature
from shoal.shm_backend.liveness import PeerLiveness
from shoal.shm_backend.phase_board import SIZE_BYTES, PhaseBoard
from shoal.shm_backend.segment import SharedSegment, attach
from shoal.shm_backend.waiter import HEALTH_EVERY_S, SHORT_SPIN_S, SPIN_S, AdaptiveSpin, Waiter


def test_spins_last_longer_where_others_came_in_time_and_hardly_at_all_where_they_never_do() -> (
    None
):
    spins = AdaptiveSpin(SPIN_S)
    for _ in range(20):
        spins.on_miss()
    assert spins.limit_s == SHORT_SPIN_S
    spins.on_hit()
    assert spins.limit_s == 2 * SHORT_SPIN_S
    for _ in range(20):
        spins.on_hit()
    assert spins.limit_s == SPIN_S


def test_nobody_spins_where_there_are_more_ranks_than_cores() -> None:
    spins = AdaptiveSpin(0.0)
    spins.on_hit()
    spins.on_miss()
    assert spins.limit_s == 0.0


def test_a_rank_spins_for_less_after_the_others_came_late(monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = _Meeting(monkeypatch, ranks=2)
    meeting.while_asleep(lambda: meeting.ranks[1].publish())
    meeting.waiting.until(meeting.mine.all_reached, 1)
    assert meeting.waiting.spins.limit_s == SPIN_S / 2


def test_others_that_come_one_by_one_are_no_reason_to_ask_the_system_after_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meeting = _Meeting(monkeypatch, ranks=4)
    meeting.while_asleep(*[other.publish for other in meeting.ranks[1:]])
    meeting.waiting.until_without_spinning(meeting.mine.all_reached, 1)
    assert meeting.asked == 0


def test_a_rank_that_sleeps_for_long_looks_after_the_others_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meeting = _Meeting(monkeypatch, ranks=2)
    meeting.while_asleep(*[lambda: meeting.pass_by(HEALTH_EVERY_S)] * 5, meeting.ranks[1].publish)
    meeting.waiting.until_without_spinning(meeting.mine.all_reached, 1)
    assert meeting.asked == 5


def test_a_rank_that_gives_up_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = _Meeting(monkeypatch, ranks=3)
    meeting.while_asleep(meeting.ranks[1].publish, lambda: meeting.ranks[2].fail("out of memory"))
    with pytest.raises(
        PeerLost, match=r"rank 2 gave up while rank 0 waited for it in barrier.*out of memory"
    ):
        meeting.waiting.until_without_spinning(meeting.mine.all_reached, 1)


class _Meeting:
    """Ranks in one process, of which the first waits; its clock goes on only where it is told
    to.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
        memories = [SharedSegment(SIZE_BYTES) for _ in range(ranks)]
        self.ranks = []
        for rank, memory in enumerate(memories):
            others = {
                other: attach(memories[other].description)
                for other in range(ranks)
                if other != rank
            }
            self.ranks.append(
                PhaseBoard(rank, memory, {other: a for other, a in others.items() if a is not None})
            )
        for memory in memories:
            memory.close()
        call = CallSignature("barrier")
        for board in self.ranks:
            board.begin(call, call.encoded)
        self.mine, self.asked, self.now_s = self.ranks[0], 0, 0.0
        self.patch, peers = monkeypatch, PeerLiveness({0: os.getpid()})
        monkeypatch.setattr("shoal.shm_backend.waiter.time.monotonic", lambda: self.now_s)
        monkeypatch.setattr(peers, "dead", self._dead)
        peers.close()
        self.waiting = Waiter(self.mine, peers, timeout_s=60.0)

    def while_asleep(self, *events: Callable[[], object]) -> None:
        """What happens, one thing in each sleep."""
        left = iter(events)
        self.patch.setattr(self.mine, "sleep", lambda *_: next(left)())

    def pass_by(self, time_s: float) -> None:
        self.now_s += time_s

    def _dead(self) -> list[int]:
        self.asked += 1
        return []
