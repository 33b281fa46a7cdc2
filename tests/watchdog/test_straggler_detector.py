"""The judgement of slow ranks on times that are made up: no process, no clock."""

from __future__ import annotations

import random

from shoal.watchdog.progress_word import Phase, ProgressWord, RankProgress, StepTimes
from shoal.watchdog.straggler_detector import SlowRank, StragglerDetector

MS = 10**6


def progress(steps: list[StepTimes], stage: int = 0) -> RankProgress:
    word = ProgressWord(1, Phase.FORWARD, 0, len(steps), 0, 0, 0, -1, 0)
    return RankProgress(word, {}, {}, steps[-32:], stage)


class Ranks:
    """Ranks that end each step together; the later ones make the others wait."""

    def __init__(self, ranks: int, seed: int) -> None:
        self.draw = random.Random(seed)
        self.steps: list[list[StepTimes]] = [[] for _ in range(ranks)]
        self.detector = StragglerDetector()

    def step(self, busy_ms: list[float], data_ms: float = 1.0, late_data: int = -1) -> None:
        longest = max(busy_ms)
        for rank, busy in enumerate(busy_ms):
            data = busy - 5 if rank == late_data else data_ms
            number = len(self.steps[rank]) + 1
            self.steps[rank].append(
                StepTimes(number, int(longest * MS), int((longest - busy) * MS), int(data * MS))
            )

    def look(self) -> list[SlowRank]:
        return self.detector.look({r: progress(steps) for r, steps in enumerate(self.steps)})


def test_a_rank_for_which_the_others_wait_is_named_once_within_20_steps() -> None:
    ranks = Ranks(4, 0)
    for _ in range(3 + 20):
        assert ranks.look() == []
        ranks.step([10, 11, 25, 9])
    (slow,) = ranks.look()
    assert (slow.rank, slow.part) == (2, "compute")
    assert 0.010 < slow.more_s < 0.016
    assert "rank 2 of 4 is slow" in slow.describe(4)
    ranks.step([10, 11, 25, 9])
    assert ranks.look() == []


def test_a_rank_that_waits_for_its_data_is_named_with_that() -> None:
    ranks = Ranks(3, 0)
    for _ in range(23):
        ranks.step([10, 30, 10], late_data=1)
    (slow,) = ranks.look()
    assert (slow.rank, slow.part) == (1, "data")


def test_noise_names_nobody() -> None:
    for seed in range(8):
        ranks = Ranks(2 + seed % 4, seed)
        for _ in range(300):
            ranks.step([ranks.draw.lognormvariate(2, 0.8) for _ in ranks.steps])
            assert ranks.look() == []


def test_of_two_ranks_one_is_named_only_if_it_takes_twice_as_long() -> None:
    for busy, named in (([10.0, 15.0], []), ([10.0, 25.0], [1])):
        ranks = Ranks(2, 0)
        for _ in range(30):
            ranks.step(busy)
        assert [slow.rank for slow in ranks.look()] == named


def times(count: int, busy_ms: float, waited_ms: float, first: int = 1) -> list[StepTimes]:
    total, waited = int((busy_ms + waited_ms) * MS), int(waited_ms * MS)
    return [StepTimes(first + index, total, waited, 0) for index in range(count)]


def test_ranks_of_a_pipeline_are_compared_within_their_stage() -> None:
    detector = StragglerDetector()
    words = {
        0: progress(times(30, 10, 5), 0),
        1: progress(times(30, 30, 0), 1),
        2: progress(times(30, 10, 5), 0),
        3: progress(times(30, 70, 0), 1),
    }
    assert [slow.rank for slow in detector.look(words)] == [3]


def test_ranks_that_step_alone_are_compared_by_their_own_time() -> None:
    detector = StragglerDetector()
    words = {rank: progress(times(30, 10, 0)) for rank in range(3)}
    words[1] = progress(times(25, 20, 0))
    assert [slow.rank for slow in detector.look(words)] == [1]
