"""`shoal schedule -o`: a figure of a schedule table, with one row for each rank."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.plotting.curves import STYLE, check_can_draw, write_figure
from shoal.strategies.pipeline.schedule_table import Action, ScheduleTable
from shoal.strategies.pipeline.schedule_timing import (
    bubble_fractions,
    expected_bubble,
    length,
    timeline,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, as in shoal.plotting.curves.
COLORS = {"F": "#56B4E9", "B": "#E69F00", "I": "#E69F00", "W": "#009E73"}
LABELS = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}
SECOND_STAGE_ALPHA = 0.55
"""Opacity of every second stage of a rank, so that stages can be told apart."""
SECOND_STAGE_LABEL = "paler: every second stage of a rank"


def save(table: ScheduleTable, output: Path) -> None:
    """Draw a table into a file. Raises ConfigError: the suffix is unknown."""
    check_can_draw(output)
    from matplotlib import rc_context

    with rc_context(STYLE):
        write_figure(_figure(table), output)


def _figure(table: ScheduleTable) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    slots = timeline(table)
    per_rank = table.num_stages // table.num_ranks
    total = length(slots)
    figure = Figure(
        figsize=(max(6.0, 0.28 * total), 1.3 + 0.45 * table.num_ranks),
        dpi=150,
        layout="constrained",
    )
    axes = figure.add_subplot()
    for rank, row in enumerate(slots):
        stages = table.stages_of(rank)
        for start, end, action in row:
            alpha = 1.0 if stages.index(action.stage) % 2 == 0 else SECOND_STAGE_ALPHA
            _draw_action(axes, action, rank, (start, end), alpha)
    axes.set_yticks(range(table.num_ranks), [f"rank {rank}" for rank in range(table.num_ranks)])
    axes.invert_yaxis()
    axes.set_xlim(0, total)
    axes.grid(False)
    axes.set_xlabel("time, in forward passes through a stage")
    formula, expected = expected_bubble(
        table.name, table.num_ranks, table.num_microbatches, per_rank
    )
    actual = max(bubble_fractions(slots))
    axes.set_title(f"{table.name}: idle {100 * actual:.1f} % ({formula} = {100 * expected:.1f} %)")
    kinds = sorted({slot.action.kind for row in slots for slot in row}, key="FBIW".index)
    handles = [Patch(color=COLORS[kind], label=LABELS[kind]) for kind in kinds]
    if per_rank > 1:
        paler = Patch(facecolor=COLORS["F"], alpha=SECOND_STAGE_ALPHA, label=SECOND_STAGE_LABEL)
        handles.append(paler)
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return figure


def _draw_action(
    axes: Axes, action: Action, rank: int, times: tuple[float, float], alpha: float
) -> None:
    """Draw a bar with the number of the micro-batch."""
    start, end = times
    width = end - start
    axes.barh(
        rank,
        width,
        left=start,
        height=0.9,
        color=COLORS[action.kind],
        alpha=alpha,
        edgecolor="white",
    )
    axes.text(start + width / 2, rank, str(action.microbatch), ha="center", va="center", fontsize=7)
