"""The timing of a schedule table: the start of each action, idle time, micro-batches in flight.

      table      F0  F1  B0      B1             the actions of a rank, in order
      timeline   0   1   2       4       6      their starts and ends, in forward passes

The times are those of an ideal pipeline: stages of equal time, and sends that take none.

`render` draws them as text, for `shoal schedule`:

rank 0  f0f1 · · ·b0──b1──      one row for each rank
rank 1   ·f0f1b0──b1── · ·      one column for the time of a forward pass through a stage
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

from shoal.costs.pass_table import Action, Kind
from shoal.strategies.pipeline.schedules import ScheduleTable

COSTS: Mapping[Kind, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""A backward pass takes about twice as long as a forward pass; its halves are equal."""


class Slot(NamedTuple):
    """An action with its start and end, in the unit of the costs."""

    start: float
    end: float
    action: Action


def timeline(table: ScheduleTable) -> list[list[Slot]]:
    """Return for each rank its actions with their times, as long as `COSTS` says.

    Each action starts as soon as its rank is free and its dependencies are done.
    """
    ends: list[float] = []
    slots: list[list[Slot]] = [[] for _ in table.rows]
    for rank, action, needs, _ in table.order:
        free = slots[rank][-1].end if slots[rank] else 0.0
        start = max([free, *(ends[index] for index in needs)])
        ends.append(start + COSTS[action.kind])
        slots[rank].append(Slot(start, ends[-1], action))
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


LEGEND = {
    "F": "f3 forward of micro-batch 3",
    "B": "b3─ its backward",
    "I": "i3 its backward for inputs",
    "W": "w3 for weights",
}


def render(table: ScheduleTable) -> str:
    """Draw the rows. Every second stage of a rank is in capitals; a dot is idle time."""
    slots = timeline(table)
    column = len(str(table.num_microbatches - 1)) + 1
    names = [f"rank {rank}" for rank in range(table.num_ranks)]
    rows = []
    for rank, row in enumerate(slots):
        stages = table.stages_of(rank)
        cells = "·".rjust(column) * round(length(slots))
        for start, end, action in row:
            is_second_stage = stages.index(action.stage) % 2 == 1
            letter = action.kind if is_second_stage else action.kind.lower()
            width = round(end - start) * column
            text = f"{letter}{action.microbatch}".ljust(column).ljust(width, "─")
            cells = cells[: round(start) * column] + text + cells[round(end) * column :]
        rows.append(f"{names[rank].ljust(len(names[-1]))}  {cells}")
    return "\n".join(rows)


def legend(table: ScheduleTable) -> str:
    """Draw a table, with an explanation, its bubble fractions and its micro-batches in flight."""
    kinds = sorted({action.kind for row in table.rows for action in row}, key="FBIW".index)
    per_rank = table.num_stages // table.num_ranks
    words = [LEGEND[kind] for kind in kinds]
    if per_rank > 1:
        words.append("capitals: the rank's other stage")
    formula, expected = expected_bubble(
        table.name, table.num_ranks, table.num_microbatches, per_rank
    )
    actual = max(bubble_fractions(timeline(table)))
    held = f"held at once: {', '.join(map(str, in_flight(table)))} micro-batches, rank by rank"
    if per_rank > 1:
        held += f", each in one of the rank's {per_rank} stages"
    idle = (
        f"idle: {100 * actual:.1f} % of a step in this table; the formula {formula} gives "
        f"{100 * expected:.1f} %"
    )
    return "\n".join([render(table), "", ", ".join(words), idle, held])
