"""A table as text: one row a rank, one column a unit of time, the time of a forward pass
through one stage.
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
    """The rows alone. Every second stage of a rank is in capitals; idle time is dots."""
    slots = timeline(table)
    unit = len(str(table.num_microbatches - 1)) + 1
    names = [f"rank {rank}" for rank in range(table.num_ranks)]
    lines = []
    for rank, row in enumerate(slots):
        cells = "·".rjust(unit) * round(length(slots))
        for start, end, action in row:
            letter = (
                action.kind.lower()
                if not table.stages_of(rank).index(action.stage) % 2
                else action.kind
            )
            width = round(end - start) * unit
            text = f"{letter}{action.microbatch}".ljust(unit).ljust(width, "─")
            cells = cells[: round(start) * unit] + text + cells[round(end) * unit :]
        lines.append(f"{names[rank].ljust(len(names[-1]))}  {cells}")
    return "\n".join(lines)


def legend(table: ScheduleTable) -> str:
    """The drawing, what it means, how long ranks are idle and how much they hold."""
    kinds = sorted({action.kind for row in table.rows for action in row}, key="FBIW".index)
    per_rank = table.num_stages // table.num_ranks
    legend = [LEGEND[kind] for kind in kinds] + (
        ["capitals: the rank's other stage"] if per_rank > 1 else []
    )
    text, ideal = expected_bubble(table.name, table.num_ranks, table.num_microbatches, per_rank)
    shares = bubble_fractions(timeline(table))
    held = in_flight(table)
    return "\n".join(
        [
            render(table),
            "",
            ", ".join(legend),
            f"idle: {100 * max(shares):.1f} % of a step in this table; the formula {text} gives "
            f"{100 * ideal:.1f} %",
            f"held at once: {', '.join(map(str, held))} micro-batches, rank by rank"
            + (f", each in one of the rank's {per_rank} stages" if per_rank > 1 else ""),
        ]
    )
