"""Detection of a rank that is slower than the others, from the times of their steps.

Ranks are compared by the time in which they wait for nobody: where ranks step together, the slow
one waits least, and the others wait for it. In a pipeline, where waits are normal, a rank is
compared with those of its stage.

No clocks are compared, for each rank measures its own times. No clock and no process is used here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from shoal.watchdog.progress_word import RankProgress, StepTimes

WINDOW, REQUIRED, REQUIRED_OF_TWO = 20, 18, 20
"""In so many of the last steps a rank must be busy for longer than the others; and where there is
one other, for one of two always is.
"""
SKIPPED_STEPS = 3
"""The first steps of a process compile, and fill caches."""
BUSY_FACTOR, BUSY_FACTOR_OF_TWO = 1.5, 2.0
"""Times as long as the others, by their median; and where there is one other."""


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
        others = f"than rank{'s'[: len(self.than) - 1]} {', '.join(map(str, self.than))}"
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
        windows = {rank: _last_steps(each.steps) for rank, each in progress.items()}
        found = []
        for rank, each in progress.items():
            others = [
                other
                for other in progress
                if other != rank and windows[other] and progress[other].stage == each.stage
            ]
            is_judged = rank not in self._named and windows[rank] and others
            if is_judged and _is_slow(rank, others, windows):
                self._named.add(rank)
                found.append(_slow_rank(rank, others, windows))
        return found


def _last_steps(steps: Sequence[StepTimes]) -> list[StepTimes]:
    """Return the steps of a window; none before there are as many."""
    settled = [times for times in steps if times.step > SKIPPED_STEPS]
    return settled[-WINDOW:] if len(settled) >= WINDOW else []


def _is_slow(rank: int, others: Sequence[int], windows: Mapping[int, Sequence[StepTimes]]) -> bool:
    required, factor = REQUIRED, BUSY_FACTOR
    if len(others) == 1:
        required, factor = REQUIRED_OF_TWO, BUSY_FACTOR_OF_TWO
    usual_ns = median(times.busy_ns for other in others for times in windows[other])
    return sum(times.busy_ns > factor * usual_ns for times in windows[rank]) >= required


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
