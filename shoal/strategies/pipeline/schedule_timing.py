"""When each action of a table runs, how long ranks are idle, and how many micro-batches they
hold at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from shoal.strategies.pipeline.schedule_table import Action, Kind, ScheduleTable, topological_order

COSTS: Mapping[Kind, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""A backward pass is about twice a forward pass, in equal halves for inputs and weights."""


class Slot(NamedTuple):
    """An action in time."""

    start: float
    end: float
    action: Action


def timeline(
    table: ScheduleTable, cost: Callable[[Action], float] | None = None
) -> list[list[Slot]]:
    """For each rank its actions, each as early as its rank and what it waits for allow; sending
    takes no time.

    Args: cost: how long an action takes, in any unit; `COSTS` of its kind where it is not given.
    """
    cost = cost or (lambda action: COSTS[action.kind])
    ends: dict[Action, float] = {}
    slots: list[list[Slot]] = [[] for _ in table.rows]
    for rank, action in topological_order(table):
        free = slots[rank][-1].end if slots[rank] else 0.0
        start = max([free, *(ends[awaited] for awaited in table.dependencies(action))])
        ends[action] = start + cost(action)
        slots[rank].append(Slot(start, ends[action], action))
    return slots


def length(slots: list[list[Slot]]) -> float:
    """From the first action of all ranks to the last."""
    return max(slot.end for row in slots for slot in row)


def bubble_fractions(slots: list[list[Slot]]) -> list[float]:
    """For each rank the share of the whole time in which it computes nothing."""
    total = length(slots)
    return [1 - sum(slot.end - slot.start for slot in row) / total for row in slots]


def expected_bubble(
    name: str, ranks: int, microbatches: int, per_rank: int = 1
) -> tuple[str, float]:
    """The idle share as papers give it, as text and as a number; stages are equal, B = 2F, I = W =
    F.

    Sources: Huang et al., NeurIPS 2019 (GPipe); Narayanan et al., SC 2021 (1F1B, interleaved); Qi
    et al., ICLR 2024
    (zero bubble: ZB-H1 and ZB-V).
    """
    p, m, v = ranks, microbatches, per_rank
    if name == "naive":
        return "(p-1)/p", (p - 1) / p
    if name in ("gpipe", "1f1b"):
        return "(p-1)/(m+p-1)", (p - 1) / (m + p - 1)
    if name == "interleaved":
        return "(p-1)/(vm+p-1)", (p - 1) / (v * m + p - 1)
    if name == "zero-bubble":
        return "(p-1)/(3vm+p-1)", (p - 1) / (3 * v * m + p - 1)
    return "(p-1)/(6m+p-1)", (p - 1) / (6 * m + p - 1)


def in_flight(table: ScheduleTable) -> list[int]:
    """For each rank the most micro-batches whose activations it holds at once, over all of its
    stages together.
    """
    peaks = []
    for row in table.rows:
        held = peak = 0
        for action in row:
            held += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            peak = max(peak, held)
        peaks.append(peak)
    return peaks
