"""The breakdown of steps: every moment of a step on a rank belongs to one of six components, so the
components sum to the step.

      aside, or none of the below                            other
      blocked, and a rank that it needs has not entered      waiting
      blocked, and all have entered                          communication
      fetches samples                                        data
      in optimizer.step()                                    optimizer
      in the forward or backward pass                        compute

A moment that fits several components belongs to the first. Communication is *exposed* here: the
rank computes nothing meanwhile. Communication that goes on while the rank computes is *hidden*, and
is not part of the sum.

Everything here is arithmetic on spans: no clock, no file, no process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shoal.trace.recorder import (
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

Interval = tuple[int, int]
"""Half-open, [start, end)."""
Intervals = Sequence[Interval]
"""A set of moments: {0, 1, 2, 5, 6} is [(0, 3), (5, 7)]. None overlap, touch or are empty."""
Spans = Mapping[int, Sequence[Span]]
"""Rank -> its spans, all on one clock."""
Collectives = Mapping[tuple[str, int], Mapping[int, Span]]
"""(collective_id, number) -> rank -> the span of that rank."""
COMPONENTS = ("compute", "communication", "waiting", "data", "optimizer", "other")
SLOW_FRACTION = 0.02
"""A rank is called slow if others wait for it for at least this fraction of its step."""


@dataclass(frozen=True)
class StepBreakdown:
    """One rank's mean step, in seconds.

    Attributes:
        parts_s: the time of each of COMPONENTS; they sum to the step.
        hidden_s: time in which communication was in flight while the rank did something else.
        blamed_s: time in which other ranks waited for this rank; summed over them.
        sent_bytes: size of all exchanges of a step.
    """

    parts_s: Mapping[str, float]
    hidden_s: float
    blamed_s: float
    sent_bytes: float

    @property
    def step_s(self) -> float:
        return sum(self.parts_s.values())


class Straggler(NamedTuple):
    """The rank for which the others wait.

    Attributes:
        waited_s: time that all others together wait for it in a step.
        part: the component in which it exceeds the mean of the others most.
        more_s: the excess in this component.
    """

    rank: int
    waited_s: float
    part: str
    more_s: float


class Wait(NamedTuple):
    """An interval in which an exchange could not begin.

    Attributes: rank: the rank that entered last.
    """

    stretch: Interval
    rank: int


@dataclass(frozen=True)
class Breakdown:
    """The breakdown of all ranks.

    Attributes:
        steps: the number of steps of which the shares are means.
        shares: rank -> its mean step.
        slowest: None if no rank is slow.
    """

    steps: int
    shares: Mapping[int, StepBreakdown]
    slowest: Straggler | None


def compute_breakdown(spans: Spans) -> Breakdown:
    """Divide the traced steps of all ranks into components."""
    waits = waits_in(spans)
    blamed_ns: dict[int, float] = defaultdict(float)
    shares: dict[int, StepBreakdown] = {}
    max_steps = 0
    for rank, rank_spans in spans.items():
        num_steps = sum(span.kind == STEP for span in rank_spans)
        components = components_of(rank_spans, waits[rank])
        for other, time_ns in _attribute_wait(components["waiting"], waits[rank]).items():
            blamed_ns[other] += time_ns / max(num_steps, 1)
        shares[rank] = _mean_step(rank_spans, components, max(num_steps, 1))
        max_steps = max(max_steps, num_steps)
    shares = {
        rank: replace(share, blamed_s=blamed_ns[rank] * 1e-9) for rank, share in shares.items()
    }
    return Breakdown(max_steps, shares, _slowest(shares))


def _mean_step(
    spans: Sequence[Span], components: Mapping[str, list[Interval]], num_steps: int
) -> StepBreakdown:
    """Return one rank's mean step; `blamed_s` is not known yet."""
    unit = 1e-9 / num_steps
    exchanges = [span for span in spans if span.kind == EXCHANGE]
    in_flight = intersection(
        union(span.interval for span in exchanges),
        union(span.interval for span in spans if span.kind == STEP),
    )
    exposed = union([*components["communication"], *components["waiting"]])
    return StepBreakdown(
        parts_s={name: total_length(components[name]) * unit for name in COMPONENTS},
        hidden_s=total_length(difference(in_flight, exposed)) * unit,
        blamed_s=0.0,
        sent_bytes=sum(span.size_bytes for span in exchanges) / num_steps,
    )


def _attribute_wait(waiting: Intervals, waits: Sequence[Wait]) -> dict[int, int]:
    """Return for each rank how long one rank waited for it, in nanoseconds.

    Waits may overlap; a moment counts for the wait that ends first.
    """
    times_ns: dict[int, int] = defaultdict(int)
    for wait in sorted(waits, key=lambda wait: wait.stretch[1]):
        times_ns[wait.rank] += total_length(intersection(waiting, [wait.stretch]))
        waiting = difference(waiting, [wait.stretch])
    return times_ns


def components_of(spans: Sequence[Span], waits: Sequence[Wait]) -> dict[str, list[Interval]]:
    """Return the moments of each of COMPONENTS in one rank's steps.

    Args: waits: of this rank, from `waits_in`.
    """

    def moments_of(*kinds: str) -> list[Interval]:
        return union(span.interval for span in spans if span.kind in kinds)

    steps = moments_of(STEP)
    asides = moments_of(ASIDE)
    remaining: Intervals = difference(steps, asides)
    blocked_spans = [span for span in spans if span.kind == BLOCKED]
    exact = union(span.interval for span in blocked_spans if span.collective_id)
    # Without a collective_id, the rank counts as blocked only while an exchange is in flight.
    guessed = union(span.interval for span in blocked_spans if not span.collective_id)
    blocked = union([*exact, *intersection(guessed, moments_of(EXCHANGE))])
    waiting = intersection(blocked, union(wait.stretch for wait in waits))
    result: dict[str, list[Interval]] = {}
    for name, moments in (
        ("waiting", waiting),
        ("communication", blocked),
        ("data", moments_of(DATA)),
        ("optimizer", moments_of(OPTIMIZER)),
        ("compute", moments_of(FORWARD, BACKWARD)),
    ):
        result[name] = intersection(remaining, moments)
        remaining = difference(remaining, moments)
    return {**result, "other": union([*intersection(steps, asides), *remaining])}


def waits_in(spans: Spans) -> dict[int, list[Wait]]:
    """Return for each rank the times in which it was blocked for an exchange that a rank it needs
    had not entered.
    """
    collectives = group_collectives(spans)
    return {rank: _waits_of(rank_spans, collectives) for rank, rank_spans in spans.items()}


def _waits_of(spans: Sequence[Span], collectives: Collectives) -> list[Wait]:
    blocked: dict[tuple[str, int], list[Interval]] = defaultdict(list)
    for span in spans:
        if span.kind == BLOCKED:
            blocked[span.collective_id, span.number].append(span.interval)
    guessed = union(blocked["", 0])
    result: list[Wait] = []
    for span in spans:
        wait = wait_of(span, collectives) if span.kind == EXCHANGE else None
        if wait is None:
            continue
        exact = blocked.get((span.collective_id, span.number), ())
        while_blocked = intersection([wait.stretch], union([*guessed, *exact]))
        result += [Wait(interval, wait.rank) for interval in while_blocked]
    return result


def group_collectives(spans: Spans) -> Collectives:
    """Group the exchange spans of all ranks by exchange."""
    collectives: dict[tuple[str, int], dict[int, Span]] = defaultdict(dict)
    for rank, rank_spans in spans.items():
        for span in rank_spans:
            if span.kind == EXCHANGE:
                collectives[span.collective_id, span.number][rank] = span
    return collectives


def wait_of(span: Span, collectives: Collectives) -> Wait | None:
    """Return the wait at the begin of an exchange: from the time when this rank entered until the
    last rank that it needs did.

    None: all had entered before, or the trace lacks the span of a rank.
    """
    entered = collectives.get((span.collective_id, span.number), {})
    needed = {rank: entered[rank] for rank in span.ranks if rank in entered}
    if not needed or len(needed) < len(span.ranks):
        return None
    # A message between two ranks has another name at each end, a collective has one.
    kinds = {other.name.split()[0] for other in (span, *needed.values())}
    if len(kinds) > 1 and " > " not in span.collective_id:
        return None
    last = max(needed, key=lambda rank: needed[rank].start_ns)
    end_ns = min(needed[last].start_ns, span.end_ns)
    return Wait((span.start_ns, end_ns), last) if end_ns > span.start_ns else None


def _slowest(shares: Mapping[int, StepBreakdown]) -> Straggler | None:
    if len(shares) < 2:
        return None
    rank = max(shares, key=lambda candidate: shares[candidate].blamed_s)
    share = shares[rank]
    if share.blamed_s < SLOW_FRACTION * share.step_s:
        return None
    others = [other for candidate, other in shares.items() if candidate != rank]

    def excess_s(component: str) -> float:
        mean_s = sum(other.parts_s[component] for other in others) / len(others)
        return share.parts_s[component] - mean_s

    # Waiting and communication are effects of the other ranks, not causes.
    component = max(("compute", "data", "optimizer", "other"), key=excess_s)
    return Straggler(rank, share.blamed_s, component, excess_s(component))


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the moments in any of these intervals, which may overlap or be empty."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def intersection(first: Intervals, second: Intervals) -> list[Interval]:
    """Return the moments in both sets."""
    return difference(first, difference(first, second))


def difference(first: Intervals, second: Intervals) -> list[Interval]:
    """Return the moments in the first set that are not in the second."""
    result = []
    begin = 0  # intervals of `second` before this index end before all of `first` that remain
    for start, end in first:
        while begin < len(second) and second[begin][1] <= start:
            begin += 1
        index = begin
        while index < len(second) and second[index][0] < end:
            if second[index][0] > start:
                result.append((start, second[index][0]))
            start = max(start, second[index][1])
            index += 1
        if start < end:
            result.append((start, end))
    return result


def total_length(intervals: Intervals) -> int:
    """Return the number of moments."""
    return sum(end - start for start, end in intervals)
