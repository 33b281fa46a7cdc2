"""What the time of steps was: every moment of a step on a rank is one of six things, so they sum to
the step.

      aside, or none of the below                     other
      blocked, and somebody needed has not come yet   waiting         for the slowest
      blocked, and everybody has come                 communication   exposed: it hides behind no computing
      fetching samples                                data
      in optimizer.step()                             optimizer
      in the forward or backward pass                 compute

A moment that could be several of these is the first. Communication under way while its rank
computes is hidden, and
stands beside the sum. Spans in, numbers out: nothing here knows a clock, a file or a process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shoal.trace.intervals import Interval, Intervals, difference, intersection, total_length, union
from shoal.trace.span import (
    ASIDE,
    BACKWARD,
    BLOCKED,
    DATA,
    EXCHANGE,
    FORWARD,
    OPTIMIZER,
    STEP,
    Span,
)

Spans = Mapping[int, Sequence[Span]]
"""Of each rank, on one clock."""
Collectives = Mapping[tuple[str, int], Mapping[int, Span]]
"""By meeting and number: the span of each rank that came."""
COMPONENTS = ("compute", "communication", "waiting", "data", "optimizer", "other")
SLOW = 0.02
"""Share of a step that others must have waited for a rank before it is called slow."""


@dataclass(frozen=True)
class StepBreakdown:
    """One rank's mean step, in seconds.

    Args:
        compute_s to other_s: sum to step_s.
        hidden_s: communication was under way while the rank did something else.
        blamed_s: the other ranks were blocked because this one had not come; summed over them.
        sent_bytes: size of all exchanges of a step.
    """

    step_s: float
    compute_s: float
    communication_s: float
    waiting_s: float
    data_s: float
    optimizer_s: float
    other_s: float
    hidden_s: float
    blamed_s: float
    sent_bytes: float

    @property
    def parts_s(self) -> dict[str, float]:
        """Each of PARTS, which sum to step_s."""
        return {
            "compute": self.compute_s,
            "communication": self.communication_s,
            "waiting": self.waiting_s,
            "data": self.data_s,
            "optimizer": self.optimizer_s,
            "other": self.other_s,
        }


class Straggler(NamedTuple):
    """Whom the others waited for.

    Args: waited_s: by all others together, in a step. part: in which of PARTS it takes longer than
        the others do, and more_s by how much in the mean.
    """

    rank: int
    waited_s: float
    part: str
    more_s: float


class Wait(NamedTuple):
    """Somebody needed has not come to an exchange. Args: rank: the last one that came."""

    stretch: Interval
    rank: int


@dataclass(frozen=True)
class Breakdown:
    """Args: steps: how many the means are over. shares: by rank. slowest: None where nobody is."""

    steps: int
    shares: Mapping[int, StepBreakdown]
    slowest: Straggler | None


def compute_breakdown(spans: Spans) -> Breakdown:
    """Where the traced steps went."""
    waits = waits_in(spans)
    blamed_ns: dict[int, float] = defaultdict(float)
    shares, steps = {}, 0
    for rank, mine in spans.items():
        count = sum(span.kind == STEP for span in mine)
        parts = components_of(mine, waits[rank])
        for other, time_ns in _attribute_wait(parts["waiting"], waits[rank]).items():
            blamed_ns[other] += time_ns / max(count, 1)
        shares[rank] = _shares(mine, parts, max(count, 1))
        steps = max(steps, count)
    shares = {
        rank: replace(share, blamed_s=blamed_ns[rank] * 1e-9) for rank, share in shares.items()
    }
    return Breakdown(steps, shares, _slowest(shares))


def _shares(
    spans: Sequence[Span], parts: Mapping[str, list[Interval]], steps: int
) -> StepBreakdown:
    """Means over the steps of one rank. Args: parts: from `parts_of`."""
    unit = 1e-9 / steps
    times_s = {f"{name}_s": total_length(parts[name]) * unit for name in COMPONENTS}
    exchanges = [span for span in spans if span.kind == EXCHANGE]
    flown = intersection(
        union(span.interval for span in exchanges),
        union(span.interval for span in spans if span.kind == STEP),
    )
    seen = union([*parts["communication"], *parts["waiting"]])
    return StepBreakdown(
        step_s=sum(times_s.values()),
        **times_s,
        hidden_s=total_length(difference(flown, seen)) * unit,
        blamed_s=0.0,
        sent_bytes=sum(span.size_bytes for span in exchanges) / steps,
    )


def _attribute_wait(waiting: Intervals, waits: Sequence[Wait]) -> dict[int, int]:
    """For whom one rank waited how long, in nanoseconds; no moment counts twice."""
    found: dict[int, int] = defaultdict(int)
    for wait in sorted(waits, key=lambda wait: wait.stretch[1]):
        found[wait.rank] += total_length(intersection(waiting, [wait.stretch]))
        waiting = difference(waiting, [wait.stretch])
    return found


def components_of(spans: Sequence[Span], waits: Sequence[Wait]) -> dict[str, list[Interval]]:
    """One rank's steps, as moments of each of PARTS. Args: waits: its own, from `waits_in`."""

    def of(*kinds: str) -> list[Interval]:
        return union(span.interval for span in spans if span.kind in kinds)

    left: Intervals = difference(of(STEP), of(ASIDE))
    other = intersection(of(STEP), of(ASIDE))
    flown = of(EXCHANGE)
    known = union(span.interval for span in spans if span.kind == BLOCKED and span.collective_id)
    guessed = union(
        span.interval for span in spans if span.kind == BLOCKED and not span.collective_id
    )
    blocked = union([*known, *intersection(guessed, flown)])
    waiting = intersection(blocked, union(wait.stretch for wait in waits))
    found: dict[str, list[Interval]] = {}
    for name, moments in (
        ("waiting", waiting),
        ("communication", blocked),
        ("data", of(DATA)),
        ("optimizer", of(OPTIMIZER)),
        ("compute", of(FORWARD, BACKWARD)),
    ):
        found[name] = intersection(left, moments)
        left = difference(left, moments)
    return {**found, "other": union([*other, *left])}


def waits_in(spans: Spans) -> dict[int, list[Wait]]:
    """For each rank, when it was blocked for an exchange to which somebody it needs had not
    come yet.
    """
    met = group_collectives(spans)
    found: dict[int, list[Wait]] = {}
    for rank, mine in spans.items():
        blocked: dict[tuple[str, int], list[Interval]] = defaultdict(list)
        for span in mine:
            if span.kind == BLOCKED:
                blocked[span.collective_id, span.number].append(span.interval)
        guessed = union(blocked["", 0])
        found[rank] = []
        for span in mine:
            wait = wait_of(span, met) if span.kind == EXCHANGE else None
            if wait is not None:
                known = union(blocked.get((span.collective_id, span.number), ()))
                stretches = union(
                    [*intersection([wait.stretch], known), *intersection([wait.stretch], guessed)]
                )
                found[rank] += [Wait(stretch, wait.rank) for stretch in stretches]
    return found


def group_collectives(spans: Spans) -> Collectives:
    """Who came to which exchange."""
    met: dict[tuple[str, int], dict[int, Span]] = defaultdict(dict)
    for rank, mine in spans.items():
        for span in mine:
            if span.kind == EXCHANGE:
                met[span.collective_id, span.number][rank] = span
    return met


def wait_of(span: Span, met: Collectives) -> Wait | None:
    """How long an exchange stood still because somebody needed had not come; None where all
    had, or nobody knows.
    """
    came = met.get((span.collective_id, span.number), {})
    needed = {rank: came[rank] for rank in span.ranks if rank in came}
    if (
        len(needed) < len(span.ranks)
        or not needed
        or not all(_is_same(span, other) for other in needed.values())
    ):
        return None
    last = max(needed, key=lambda rank: needed[rank].start_ns)
    end_ns = min(needed[last].start_ns, span.end_ns)
    return Wait((span.start_ns, end_ns), last) if end_ns > span.start_ns else None


def _is_same(span: Span, other: Span) -> bool:
    """Whether two ranks mean one exchange: what one calls sending, the other calls receiving."""
    return " > " in span.collective_id or span.name.split()[0] == other.name.split()[0]


def _slowest(shares: Mapping[int, StepBreakdown]) -> Straggler | None:
    if len(shares) < 2:
        return None
    rank = max(shares, key=lambda one: shares[one].blamed_s)
    mine = shares[rank]
    if mine.blamed_s < SLOW * mine.step_s:
        return None
    others = [share for other, share in shares.items() if other != rank]

    def more(part: str) -> float:
        return mine.parts_s[part] - sum(other.parts_s[part] for other in others) / len(others)

    part = max(("compute", "data", "optimizer", "other"), key=more)
    return Straggler(rank, mine.blamed_s, part, more(part))
