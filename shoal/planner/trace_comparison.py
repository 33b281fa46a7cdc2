"""A plan beside the trace of its run: each term predicted and measured, and which is most off."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from shoal.costs.machine import Machine
from shoal.planner.strategy_search import Plan
from shoal.platform.quantity_text import seconds_text
from shoal.trace.breakdown import Spans, compute_breakdown
from shoal.trace.recorder import EXCHANGE, STEP

CONSTANTS = {
    "compute": "matmul, conv, memory and the seconds of an operation",
    "optimizer": "memory and the seconds of an optimizer's operation",
}
"""Measurements of `shoal calibrate` behind a term; of a message, its collective."""


def comparison_lines(plan: Plan, spans: Spans) -> Iterator[str]:
    """Yield the terms of a step, mean of the ranks, in the order of what they take."""
    predicted, measured = _predicted(plan), _measured(spans)
    yield f"{'':14} {'predicted':>10} {'measured':>10}  measured/predicted"
    names = {*predicted, *measured}
    for name in sorted(names, key=lambda name: -measured.get(name, 0.0)):
        before, found = predicted.get(name), measured.get(name)
        texts = ["-" if value is None else seconds_text(value) for value in (before, found)]
        ratio = f"{found / before:.2f}" if before and found else ""
        yield f"{name:14} {texts[0]:>10} {texts[1]:>10}  {ratio}".rstrip()
    both = [name for name in names if name in predicted and name in measured]
    worst = max(both, key=lambda name: abs(measured[name] - predicted[name]))
    yield ""
    yield (
        f"most off: {worst}, by {seconds_text(abs(measured[worst] - predicted[worst]))} a step; "
        f"from shoal calibrate: {CONSTANTS.get(worst, f'the collective {worst}')}"
    )


def recalibrated(machine: Machine, ranks: int, plan: Plan, spans: Spans) -> Machine:
    """Return the machine with the constants that a traced run has shown: those of computing, and of
    each kind of message that it predicts.

    Args: ranks: of the host. plan: by `machine`, of the run that was traced.
    """
    predicted, measured = _predicted(plan), _measured(spans)
    ratios = {
        name: measured[name] / predicted[name]
        for name in predicted.keys() & measured.keys()
        if predicted[name] > 0 and measured[name] > 0
    }
    speeds = machine.compute_of(ranks)
    shown = speeds.slower(ratios.get("compute", 1.0))
    collectives = {
        key: curve.scaled(ratios.get(key.split("/")[1], 1.0))
        for key, curve in machine.collectives.items()
    }
    return replace(
        machine,
        compute={**machine.compute, machine.measured_ranks(ranks): shown},
        collectives=collectives,
    )


def _predicted(plan: Plan) -> dict[str, float]:
    """Return seconds by term; of a message by its kind, whether a rank waits for it or not."""
    seconds: dict[str, float] = defaultdict(float)
    for task in plan.time.tasks if plan.time is not None else ():
        seconds[task.label.partition(" ")[0]] += task.work_s / len(plan.step.rows)
    return seconds


def _measured(spans: Spans) -> dict[str, float]:
    """Return seconds by term; of a message from when its last rank has entered it."""
    shares = compute_breakdown(spans).shares.values()
    seconds: dict[str, float] = defaultdict(float)
    for share in shares:
        for name in ("compute", "optimizer", "waiting", "data", "other"):
            seconds[name] += share.parts_s[name] / len(shares)
    flat = [span for found in spans.values() for span in found]
    steps = sum(span.kind == STEP for span in flat) / len(spans)
    entered: dict[tuple[str, int], int] = defaultdict(int)
    exchanges = [span for span in flat if span.kind == EXCHANGE]
    for span in exchanges:
        key = (span.collective_id, span.number)
        entered[key] = max(entered[key], span.start_ns)
    for span in exchanges:
        took_ns = max(span.end_ns - entered[span.collective_id, span.number], 0)
        seconds[span.name.partition(" ")[0]] += took_ns / 1e9 / steps / len(spans)
    return seconds
