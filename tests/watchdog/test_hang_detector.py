"""The judgement of hangs on words that are made up, in simulated time: no process, no clock."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from shoal.watchdog.hang_detector import (
    CYCLE_LIMIT_S,
    SLOW_FACTOR,
    Hang,
    SilenceCounter,
    find_hang,
)
from shoal.watchdog.progress_word import (
    FIRST,
    NO_KIND,
    RECV,
    SERVERS,
    THREAD_WAITS,
    WAITS,
    Phase,
    ProgressWord,
    RankProgress,
    StepTimes,
    group_id,
)

LIMIT_S = 60.0
WORLD = group_id("world", range(3))
OTHER = group_id("other", range(3))


@dataclass
class SimulatedRank:
    """A rank whose word the test writes."""

    rank: int
    ranks: tuple[int, ...] = (0, 1, 2)
    phase: Phase = Phase.FORWARD
    flags: int = 0
    kind: int = 1
    peer: int = -1
    length: int = 10
    written: int = 1
    calls: dict[int, int] = field(default_factory=lambda: {WORLD: 5})
    group: int = WORLD
    steps: list[StepTimes] = field(default_factory=list)

    def writes(self, **values: object) -> None:
        for name, value in values.items():
            setattr(self, name, value)
        self.written += 1

    def begins_call(self) -> None:
        self.calls[WORLD] += 1
        self.writes(group=WORLD, kind=1)

    def waits_in_call(self) -> None:
        self.begins_call()
        self.writes(flags=self.flags | WAITS)

    @property
    def progress(self) -> RankProgress:
        word = ProgressWord(
            self.written,
            self.phase,
            self.flags,
            7,
            self.calls.get(self.group, 0),
            self.group,
            self.kind,
            self.peer,
            self.length,
        )
        groups = {WORLD: self.ranks, OTHER: self.ranks}
        return RankProgress(word, dict(self.calls), groups, self.steps)


class Simulation:
    """Looks once a second at simulated ranks."""

    def __init__(self, ranks: int = 3) -> None:
        self.ranks = [SimulatedRank(rank) for rank in range(ranks)]
        self.silence = SilenceCounter()
        self.now_s = 1000.0

    def passes(self, seconds: float, look_s: float = 1.0, paused: bool = False) -> Hang | None:
        """Return the first hang that is found within so many seconds."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += look_s
            words = {each.rank: each.progress for each in self.ranks}
            looked = self.silence.look(words, self.now_s, paused)
            if (hang := find_hang(looked, LIMIT_S)) is not None:
                return hang
        return None


def test_a_rank_that_does_not_come_is_named_and_not_those_that_wait() -> None:
    run = Simulation()
    for rank in run.ranks[:2]:
        rank.waits_in_call()
    assert run.passes(LIMIT_S - 2) is None
    hang = run.passes(10)
    assert hang is not None
    assert (hang.late, hang.waiter, hang.is_deadlock) == (2, 0, False)


def test_a_rank_that_goes_on_is_not_late_however_long_others_wait() -> None:
    run = Simulation()
    for rank in run.ranks[:2]:
        rank.waits_in_call()
    for _ in range(20):
        run.ranks[2].writes()
        assert run.passes(LIMIT_S / 2) is None


def test_a_first_step_may_take_ten_times_as_long() -> None:
    run = Simulation()
    for rank in run.ranks:
        rank.flags = FIRST
    for rank in run.ranks[:2]:
        rank.waits_in_call()
    assert run.passes(SLOW_FACTOR * LIMIT_S - 2) is None
    hang = run.passes(10)
    assert hang is not None
    assert hang.late == 2


def test_no_rank_is_late_before_three_times_its_longest_step() -> None:
    run = Simulation()
    run.ranks[0].steps = [StepTimes(3, 50 * 10**9, 0, 0)]
    run.ranks[0].waits_in_call()
    run.ranks[1].waits_in_call()
    assert run.passes(140) is None
    assert run.passes(20) is not None


def test_the_wait_for_data_is_late_also_where_nobody_waits() -> None:
    run = Simulation(1)
    run.ranks[0].writes(phase=Phase.DATA)
    hang = run.passes(LIMIT_S + 5)
    assert hang is not None
    assert (hang.late, hang.waiter) == (0, None)


def test_a_script_may_do_anything_between_steps_while_nobody_waits() -> None:
    run = Simulation(1)
    run.ranks[0].writes(phase=Phase.BETWEEN)
    assert run.passes(100 * LIMIT_S) is None


def test_a_chain_of_waits_ends_at_the_rank_that_does_not_wait() -> None:
    run = Simulation()
    run.ranks[0].writes(kind=RECV, peer=1, flags=WAITS)
    run.ranks[1].writes(kind=RECV, peer=2, flags=WAITS)
    hang = run.passes(LIMIT_S + 5)
    assert hang is not None
    assert (hang.late, hang.waiter) == (2, 1)


def test_ranks_that_wait_for_each_other_are_told_as_such() -> None:
    run = Simulation(2)
    run.ranks[0].writes(kind=RECV, peer=1, flags=WAITS)
    run.ranks[1].writes(kind=RECV, peer=0, flags=WAITS)
    hang = run.passes(LIMIT_S + 5)
    assert hang is not None
    assert hang.is_deadlock


def test_ranks_in_collectives_that_the_other_has_not_begun_wait_for_nothing() -> None:
    run = Simulation(2)
    run.ranks[0].waits_in_call()
    run.ranks[1].calls[OTHER] = 1
    run.ranks[1].writes(group=OTHER, flags=WAITS)
    assert run.passes(CYCLE_LIMIT_S - 2) is None
    hang = run.passes(4)
    assert hang is not None
    assert (hang.late, hang.waiter, hang.is_deadlock) == (0, 1, True)


def test_another_thread_that_waits_may_bring_a_rank_on() -> None:
    run = Simulation(2)
    run.ranks[0].flags = THREAD_WAITS
    run.ranks[0].waits_in_call()
    run.ranks[1].calls[OTHER] = 1
    run.ranks[1].writes(group=OTHER, flags=WAITS)
    assert run.passes(LIMIT_S - 2) is None


def test_servers_that_do_not_answer_are_told_as_such() -> None:
    run = Simulation(2)
    for rank in run.ranks:
        rank.writes(kind=SERVERS, flags=WAITS)
    hang = run.passes(LIMIT_S + 5)
    assert hang is not None
    assert hang.is_deadlock


def test_a_wait_of_torchs_own_threads_is_known_by_the_calls_that_were_begun() -> None:
    run = Simulation()
    for rank in run.ranks[:2]:
        rank.begins_call()  # nothing says that they wait
    hang = run.passes(LIMIT_S + 5)
    assert hang is not None
    assert hang.late == 2


def test_large_messages_may_take_their_time() -> None:
    run = Simulation(2)
    for rank in run.ranks:
        rank.length = 10**9
        rank.waits_in_call()
    assert run.passes(10 * LIMIT_S) is None


def test_nobody_is_late_while_all_are_stopped() -> None:
    run = Simulation()
    run.ranks[0].waits_in_call()
    assert run.passes(10 * LIMIT_S, paused=True) is None


def test_a_suspended_host_or_launcher_makes_nobody_late() -> None:
    run = Simulation()
    run.ranks[0].waits_in_call()
    assert run.passes(LIMIT_S / 2) is None
    run.now_s += 8 * 3600
    assert run.passes(LIMIT_S / 4) is None
    for rank in run.ranks:
        rank.writes()


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    run = Simulation()
    for rank in run.ranks[:2]:
        rank.waits_in_call()
    del run.ranks[2]
    hang = run.passes(LIMIT_S + 5)  # the backend finds it at once; this is the last resort
    assert hang is not None
    assert hang.late in (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(20), range(20, 2000)])
def test_random_schedules_have_no_false_alarm_and_each_hang_is_found(seeds: range) -> None:
    for seed in seeds:
        check_schedule(seed)


def check_schedule(seed: int) -> None:
    """Run noisy steps, then let one rank not come."""
    draw = random.Random(seed)
    run = Simulation(draw.choice([2, 3]))
    members = tuple(range(len(run.ranks)))
    for rank in run.ranks:
        rank.ranks = members
        rank.calls = {WORLD: 0}
        rank.kind = NO_KIND
    for _ in range(30):  # steps of up to 50 s, with noise, stopped launchers and pauses
        order = draw.sample(run.ranks, len(run.ranks))
        for rank in order:
            assert run.passes(draw.uniform(0, 50 / len(order)), draw.uniform(0.5, 1.5)) is None
            if draw.random() < 0.1:
                run.now_s += draw.uniform(0, 1e4)
            if draw.random() < 0.1:
                assert run.passes(draw.uniform(0, 1e3), paused=True) is None
            rank.waits_in_call()
        for rank in run.ranks:
            rank.writes(flags=0, phase=draw.choice([Phase.DATA, Phase.FORWARD]))
    late = draw.choice(run.ranks)
    for rank in run.ranks:
        if rank is not late:
            assert run.passes(draw.uniform(0, 10)) is None
            rank.waits_in_call()
    hang = run.passes(LIMIT_S + 30)
    assert hang is not None
    assert hang.late == late.rank
    assert hang.silent_s < LIMIT_S + 10
