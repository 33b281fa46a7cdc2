"""Reports of a rank that does not come, from progress words that are made up."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from shoal.launch.supervise import RankMonitor, describe, describe_call
from shoal.watchdog.progress_word import (
    COLLECTIVES,
    NO_KIND,
    RECV,
    SEND,
    SERVERS,
    THREAD_WAITS,
    WAITS,
    Phase,
    ProgressWord,
    RankProgress,
    StepTimes,
    group_id,
)

WORLD, PAIR = group_id("world", range(3)), group_id("pair", (0, 2))
ALL_REDUCE, GLOO = COLLECTIVES.index("all_reduce"), COLLECTIVES.index("gloo")


def rank(kind: int = ALL_REDUCE, **values: Any) -> RankProgress:
    """Return the progress of a rank that has not written for two minutes."""
    word = ProgressWord(
        since_ns=1,
        phase=values.pop("phase", Phase.BACKWARD),
        flags=values.pop("flags", WAITS),
        step=7,
        call=values.pop("call", 1200),
        group=values.pop("group", WORLD),
        kind=kind,
        peer=values.pop("peer", -1),
        length=values.pop("length", 4096),
    )
    groups = {WORLD: (0, 1, 2), PAIR: (0, 2), 0: ()}
    return RankProgress(word, {word.group: word.call}, groups, **{"silent_s": 120.0, **values})


@dataclass
class MadeUpRanks:
    """Ranks on two hosts, as the monitor asks for them."""

    progress: dict[int, RankProgress]
    hang_limit_s: float = 60.0
    asked: list[int] = field(default_factory=list)

    @property
    def all(self) -> list[int]:
        return [*self.progress]

    def look(self) -> dict[int, RankProgress]:
        return self.progress

    def stacks(self, number: int) -> str:
        self.asked.append(number)
        return f"stack of {number}"

    def host(self, number: int) -> str:
        return "ab"[number // 2]


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        (rank(group=0), "all_reduce(4,096 numbers) (call 1,200)"),
        (rank(group=PAIR, length=0), "all_reduce() (call 1,200 of a group of ranks [0, 2])"),
        (rank(GLOO, group=0), "a collective that Gloo makes(4,096 numbers) (call 1,200)"),
        (rank(SEND, peer=2), "send(4,096 numbers) to rank 2"),
        (rank(SERVERS), "a wait for parameter servers"),
        (rank(NO_KIND), "no collective yet"),
    ],
)
def test_a_call_is_told_as_the_script_would_write_it(progress: RankProgress, words: str) -> None:
    assert describe_call(progress) == words


def test_a_line_of_a_rank_tells_step_phase_and_call() -> None:
    words = "step 8: waits in all_reduce(4,096 numbers) (call 1,200), the backward pass"
    assert words in describe(rank(group=0))
    assert "step 8: the forward pass; its last collective was send" in describe(
        rank(SEND, peer=1, flags=0, phase=Phase.FORWARD)
    )
    assert "step 8: the wait for data; unchanged for" in describe(
        rank(NO_KIND, flags=0, phase=Phase.DATA, call=0)
    )


def test_a_rank_that_others_wait_for_is_named_with_its_host_its_phase_and_their_call(
    capfd: pytest.CaptureFixture[str],
) -> None:
    late = rank(flags=0, phase=Phase.DATA, call=1199)
    ranks = MadeUpRanks({0: rank(), 1: rank(), 2: late})
    (failure,) = RankMonitor(ranks).poll()  # type: ignore[arg-type]
    words = "did not come: it is in the wait for data, while rank 0 on a waits for it in all_reduce"
    assert failure.rank == 2
    assert words in str(failure)
    told = capfd.readouterr().err
    assert f"rank 2 of 3 on b {words}" in told
    assert "No sign of it for 120 s; the limit is 60 s." in told
    assert told.count("step 8: waits in all_reduce") == 2
    assert "stack of 2\nstack of 0" in told


def test_a_rank_that_nobody_waits_for_is_told_by_its_phase_alone() -> None:
    ranks = MadeUpRanks({0: rank(NO_KIND, flags=0, phase=Phase.DATA, group=0, call=0)})
    (failure,) = RankMonitor(ranks).poll()  # type: ignore[arg-type]
    assert "hangs in the wait for data" in str(failure)
    assert ranks.asked == [0]


def test_ranks_that_wait_in_two_calls_are_told_both() -> None:
    one, other = rank(SEND, peer=1, call=5), rank(RECV, peer=0, group=PAIR, call=7)
    ranks = MadeUpRanks({0: one, 1: other})
    (failure,) = RankMonitor(ranks).poll()  # type: ignore[arg-type]
    for words in ("send(4,096 numbers) to rank 1", "recv(", "which are not the same call"):
        assert words in str(failure)


def test_workers_that_wait_for_servers_are_told_so() -> None:
    ranks = MadeUpRanks({0: rank(SERVERS, group=0), 1: rank(SERVERS, group=0)})
    (failure,) = RankMonitor(ranks).poll()  # type: ignore[arg-type]
    assert "waits for the parameter servers, which do not answer" in str(failure)


def test_a_slow_rank_is_noted_once_and_nothing_ends(capfd: pytest.CaptureFixture[str]) -> None:
    def steps(busy_ms: int) -> list[StepTimes]:
        times = StepTimes(0, 40_000_000, (40 - busy_ms) * 1_000_000, 0)
        return [times._replace(step=number) for number in range(40)]

    slow = [replace(rank(silent_s=0.0), steps=steps(busy)) for busy in (10, 10, 40)]
    monitor = RankMonitor(MadeUpRanks(dict(enumerate(slow))))  # type: ignore[arg-type]
    assert monitor.poll() == []
    assert "rank 2 of 3 on b is slow" in capfd.readouterr().err


def test_a_limit_of_nothing_looks_at_nothing() -> None:
    late = rank(flags=THREAD_WAITS)
    assert RankMonitor(MadeUpRanks({0: late}, hang_limit_s=0)).poll() == []  # type: ignore[arg-type]
