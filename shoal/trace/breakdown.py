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

A rank's time is looked at piece by piece, from each begin or end of a span to the next one.
Everything here is arithmetic on spans: no clock, no file, no process.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
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

Spans = Mapping[int, Sequence[Span]]
"""Rank -> its spans, all on one clock."""
Collectives = Mapping[tuple[str, int], Mapping[int, Span]]
"""(collective_id, number) -> rank -> the span of that rank."""
COMPONENTS = ("compute", "communication", "waiting", "data", "optimizer", "other")
PHASES = (("data", {DATA}), ("optimizer", {OPTIMIZER}), ("compute", {FORWARD, BACKWARD}))
"""Components of moments in which a rank is not blocked, each with the kinds of its spans."""
WAIT = "wait"
"""The kind of a span that `wait_of` makes."""
ANY = ("", 0)
"""Key of a wait for any exchange: the rank is blocked while one is in flight."""
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
    collectives = group_collectives(spans)
    blamed_ns: dict[int, float] = defaultdict(float)
    parts_ns: dict[int, Counter[str]] = {}
    steps = {rank: sum(each.kind == STEP for each in spans[rank]) for rank in spans}
    for rank, rank_spans in spans.items():
        parts_ns[rank] = Counter()
        for length_ns, active in _pieces(rank_spans, collectives):
            component, late = _component(active)
            parts_ns[rank][component] += length_ns
            if late is not None:
                blamed_ns[late] += length_ns / steps[rank]
            if component not in ("waiting", "communication") and _has(EXCHANGE, active):
                parts_ns[rank]["hidden"] += length_ns
    shares = {}
    for rank, rank_spans in spans.items():
        num_steps = max(steps[rank], 1)
        sent_bytes = sum(span.size_bytes for span in rank_spans if span.kind == EXCHANGE)
        shares[rank] = StepBreakdown(
            parts_s={name: parts_ns[rank][name] * 1e-9 / num_steps for name in COMPONENTS},
            hidden_s=parts_ns[rank]["hidden"] * 1e-9 / num_steps,
            blamed_s=blamed_ns[rank] * 1e-9,
            sent_bytes=sent_bytes / num_steps,
        )
    return Breakdown(max(steps.values(), default=0), shares, _slowest(shares))


def _pieces(
    spans: Sequence[Span], collectives: Collectives
) -> Iterator[tuple[int, Sequence[Span]]]:
    """Yield the length of each piece of a rank's steps, and the spans and waits around it."""
    waits = [wait_of(span, collectives) for span in spans if span.kind == EXCHANGE]
    begun: dict[int, list[Span]] = defaultdict(list)
    for span in (*spans, *filter(None, waits)):
        begun[span.start_ns].append(span)
    times = {time_ns for each in begun.values() for span in each for time_ns in span.interval}
    active: list[Span] = []
    for time_ns, next_ns in pairwise(sorted(times)):
        active = [span for span in (*active, *begun[time_ns]) if span.end_ns > time_ns]
        if _has(STEP, active):
            yield next_ns - time_ns, active


def _has(kind: str, spans: Sequence[Span]) -> bool:
    return any(span.kind == kind for span in spans)


def _component(active: Sequence[Span]) -> tuple[str, int | None]:
    """Return the component of a moment, and the rank that it is a wait for, if it is one.

    Of several waits the one that ends first counts.
    """
    kinds = {span.kind for span in active}
    if ASIDE in kinds:
        return "other", None
    blocked = {(span.collective_id, span.number) for span in active if span.kind == BLOCKED}
    waits = [
        span
        for span in active
        if span.kind == WAIT and not blocked.isdisjoint((ANY, (span.collective_id, span.number)))
    ]
    if waits:
        return "waiting", min(waits, key=lambda wait: wait.end_ns).ranks[0]
    if blocked - {ANY} or (blocked and EXCHANGE in kinds):
        return "communication", None
    return next((name for name, own in PHASES if not kinds.isdisjoint(own)), "other"), None


def group_collectives(spans: Spans) -> Collectives:
    """Group the exchange spans of all ranks by exchange."""
    collectives: dict[tuple[str, int], dict[int, Span]] = defaultdict(dict)
    for rank, rank_spans in spans.items():
        for span in rank_spans:
            if span.kind == EXCHANGE:
                collectives[span.collective_id, span.number][rank] = span
    return collectives


def wait_of(span: Span, collectives: Collectives) -> Span | None:
    """Return the wait at the begin of an exchange: from the time when this rank entered until the
    last rank that it needs did. Its `ranks` are that one.

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
    if end_ns <= span.start_ns:
        return None
    return span._replace(kind=WAIT, name=f"waiting for rank {last}", end_ns=end_ns, ranks=(last,))


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
