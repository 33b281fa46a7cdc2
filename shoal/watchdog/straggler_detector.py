"""Detection of a rank that is slower than the others, from the times of their steps.

    together    ranks end each step together: the slow one waits least, and the others wait for it
    pipeline    waits are normal: a rank is compared with those of its stage, where there are some
    alone       no rank waits for another: busy times are compared

No clocks are compared, for each rank measures its own times. No clock and no process is used here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from shoal.watchdog.progress_word import RankProgress, StepTimes

WINDOW, REQUIRED, REQUIRED_OF_TWO = 20, 18, 20
"""In so many of the last steps a rank must be the slowest one; of two ranks one always is. By
chance that happens to one of three ranks in a window of a million.
"""
SKIPPED_STEPS = 3
"""The first steps of a process compile, and fill caches."""
WAITED_SHARE, WAITED_SHARE_OF_TWO = 0.3, 0.5
"""The part of a step for which the others wait, by median; and where there is one other."""
BUSY_FACTOR = 1.5


@dataclass(frozen=True)
class SlowRank:
    """A rank that is slower than others.

    Attributes:
        rank: the rank.
        step: the last step that was looked at.
        part: where it takes longer: "data" or "compute".
        more_s: time by which it takes longer in this part, in a step.
        step_s: the median step of the ranks.
        than: the ranks with which it was compared.
    """

    rank: int
    step: int
    part: str
    more_s: float
    step_s: float
    than: tuple[int, ...]

    def describe(self, world: int, host: str = "") -> str:
        """Return the sentence for the user, with the rank's host where there are several."""
        others = f"than rank{'s' if len(self.than) > 1 else ''} {_listed(self.than)}"
        on_host = f" on {host}" if host else ""
        doing = "waits for data" if self.part == "data" else "computes"
        return (
            f"rank {self.rank} of {world}{on_host} is slow: in each of its last {WINDOW} steps "
            f"(to step {self.step} of this start) it {doing} {self.more_s * 1e3:.3g} ms longer "
            f"{others}; a step takes {self.step_s * 1e3:.3g} ms"
        )


class StragglerDetector:
    """Looks at the steps of all ranks, and names each slow rank once."""

    def __init__(self) -> None:
        self._named: set[int] = set()

    def look(self, progress: Mapping[int, RankProgress]) -> list[SlowRank]:
        """Return the ranks that are found slow now, and were not before."""
        steps = {rank: _settled(each.steps) for rank, each in progress.items()}
        found = []
        for rank, each in progress.items():
            if rank in self._named or len(steps[rank]) < WINDOW:
                continue
            slow = self._compare(rank, each, progress, steps)
            if slow is not None:
                self._named.add(rank)
                found.append(slow)
        return found

    def _compare(
        self,
        rank: int,
        own: RankProgress,
        progress: Mapping[int, RankProgress],
        steps: Mapping[int, Sequence[StepTimes]],
    ) -> SlowRank | None:
        others = [other for other in progress if other != rank and len(steps[other]) >= WINDOW]
        if own.pacing == "together":
            if len(others) < len(progress) - 1 or not others:
                return None
            return _least_waiting(rank, others, steps)
        if own.pacing == "pipeline":
            others = [other for other in others if progress[other].stage == own.stage]
        return _busier(rank, others, steps) if others else None


def _settled(steps: Sequence[StepTimes]) -> list[StepTimes]:
    return [times for times in steps if times.step > SKIPPED_STEPS]


def _common_steps(steps: Mapping[int, Sequence[StepTimes]]) -> dict[int, list[StepTimes]] | None:
    """Return the last steps that all ranks have taken; None if they are fewer than a window."""
    tables = {rank: {times.step: times for times in taken} for rank, taken in steps.items()}
    common = sorted(set.intersection(*(set(table) for table in tables.values())))[-WINDOW:]
    if len(common) < WINDOW:
        return None
    return {rank: [table[step] for step in common] for rank, table in tables.items()}


def _least_waiting(
    rank: int, others: Sequence[int], steps: Mapping[int, Sequence[StepTimes]]
) -> SlowRank | None:
    """Return the rank if the others wait for it in nearly all of the last common steps."""
    windows = _common_steps({each: steps[each] for each in (rank, *others)})
    if windows is None:
        return None
    own = windows[rank]
    waited_ns = [[windows[other][i].waited_ns for other in others] for i in range(WINDOW)]
    pairs = list(zip(own, waited_ns, strict=True))
    least_often = sum(times.waited_ns < min(theirs) for times, theirs in pairs)
    excess_ns = median(median(theirs) - times.waited_ns for times, theirs in pairs)
    step_ns = median(times.total_ns for times in own)
    share = WAITED_SHARE if len(others) > 1 else WAITED_SHARE_OF_TWO
    required = REQUIRED if len(others) > 1 else REQUIRED_OF_TWO
    if least_often < required or excess_ns <= share * step_ns:
        return None
    return _slow_rank(rank, others, windows)


def _busier(
    rank: int, others: Sequence[int], steps: Mapping[int, Sequence[StepTimes]]
) -> SlowRank | None:
    """Return the rank if it computes longer than the others in nearly all of its last steps."""
    windows = {each: steps[each][-WINDOW:] for each in (rank, *others)}
    usual_ns = median(times.busy_ns for other in others for times in windows[other])
    if sum(times.busy_ns > BUSY_FACTOR * usual_ns for times in windows[rank]) < REQUIRED:
        return None
    return _slow_rank(rank, others, windows)


def _slow_rank(
    rank: int, others: Sequence[int], windows: Mapping[int, Sequence[StepTimes]]
) -> SlowRank:
    """Return the rank with the part of a step in which it exceeds the others most."""

    def excess_ns(part: str) -> float:
        own, rest = (
            median(
                times.data_ns if part == "data" else times.busy_ns - times.data_ns
                for each in ranks
                for times in windows[each]
            )
            for ranks in ((rank,), others)
        )
        return own - rest

    part = max(("data", "compute"), key=excess_ns)
    last = windows[rank]
    step_s = median(times.total_ns for times in last) * 1e-9
    return SlowRank(rank, last[-1].step, part, excess_ns(part) * 1e-9, step_s, tuple(others))


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
