"""The drawing of a schedule table as text, for `shoal schedule`.

rank 0  f0f1 · · ·b0──b1──      one row for each rank
rank 1   ·f0f1b0──b1── · ·      one column for the time of a forward pass through a stage
"""

from __future__ import annotations

from shoal.strategies.pipeline.schedule_table import ScheduleTable
from shoal.strategies.pipeline.schedule_timing import (
    bubble_fractions,
    expected_bubble,
    in_flight,
    length,
    timeline,
)

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
