"""The timing of a schedule table: the start of each action, idle time, micro-batches in flight.

      table      F0  F1  B0      B1             the actions of a rank, in order
      timeline   0   1   2       4       6      their starts and ends, in forward passes

The times are those of an ideal pipeline: stages of equal time, and sends that take none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import NamedTuple

from shoal.strategies.pipeline.schedule_table import Action, Kind, ScheduleTable, topological_order

COSTS: Mapping[Kind, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""A backward pass takes about twice as long as a forward pass; its halves are equal."""


class Slot(NamedTuple):
    """An action with its start and end, in the unit of the costs."""

    start: float
    end: float
    action: Action


def timeline(
    table: ScheduleTable, cost: Callable[[Action], float] | None = None
) -> list[list[Slot]]:
    """Return for each rank its actions with their times.

    Each action starts as soon as its rank is free and its dependencies are done.

    Args: cost: the duration of an action, in any unit; None for `COSTS` of its kind.
    """
    cost = cost or (lambda action: COSTS[action.kind])
    ends: dict[Action, float] = {}
    slots: list[list[Slot]] = [[] for _ in table.rows]
    for rank, action in topological_order(table):
        free = slots[rank][-1].end if slots[rank] else 0.0
        start = max([free, *(ends[dependency] for dependency in table.dependencies(action))])
        ends[action] = start + cost(action)
        slots[rank].append(Slot(start, ends[action], action))
    return slots


def length(slots: list[list[Slot]]) -> float:
    """Return the time from the first action of all ranks to the end of the last."""
    return max(slot.end for row in slots for slot in row)


def bubble_fractions(slots: list[list[Slot]]) -> list[float]:
    """Return for each rank the fraction of the step in which it is idle."""
    total = length(slots)
    return [1 - sum(slot.end - slot.start for slot in row) / total for row in slots]


def expected_bubble(
    name: str, ranks: int, microbatches: int, per_rank: int = 1
) -> tuple[str, float]:
    """Return the bubble fraction of the papers, as a formula and as a number.

    Stages take equally long; B = 2F, I = W = F.

    Sources: Huang et al., NeurIPS 2019 (GPipe); Narayanan et al., SC 2021 (1F1B, interleaved); Qi
    et al., ICLR 2024 (zero bubble: ZB-H1 and ZB-V).
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
    """Return for each rank the largest number of micro-batches in flight, summed over its stages.

    A micro-batch is in flight from its forward pass to the end of its backward pass; its
    activations are in memory.
    """
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    peaks = []
    for row in table.rows:
        counts = accumulate(change[action.kind] for action in row)
        peaks.append(max(counts, default=0))
    return peaks
