"""`shoal schedule -o`: a table of actions as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.plotting.curves import STYLE, refuse_suffix, write_figure
from shoal.strategies.pipeline.schedule_table import ScheduleTable
from shoal.strategies.pipeline.schedule_timing import (
    bubble_fractions,
    expected_bubble,
    length,
    timeline,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette, as in shoal.plotting.curves; the second stage of a rank is paler.
COLORS = {"F": "#56B4E9", "B": "#E69F00", "I": "#E69F00", "W": "#009E73"}
WORDS = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}


def save(table: ScheduleTable, output: Path) -> None:
    """Draw a table into a .png, .svg or .pdf. Raises ConfigError: another suffix."""
    refuse_suffix(output)
    from matplotlib import rc_context

    with rc_context(STYLE):
        write_figure(_figure(table), output)


def _figure(table: ScheduleTable) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    slots, per_rank = timeline(table), table.num_stages // table.num_ranks
    total = length(slots)
    figure = Figure(
        figsize=(max(6.0, 0.28 * total), 1.3 + 0.45 * table.num_ranks),
        dpi=150,
        layout="constrained",
    )
    axes = figure.add_subplot()
    for rank, row in enumerate(slots):
        for start, end, action in row:
            pale = 1.0 if table.stages_of(rank).index(action.stage) % 2 == 0 else 0.55
            width = end - start
            axes.barh(
                rank,
                width,
                left=start,
                height=0.9,
                color=COLORS[action.kind],
                alpha=pale,
                edgecolor="white",
            )
            axes.text(
                start + width / 2,
                rank,
                str(action.microbatch),
                ha="center",
                va="center",
                fontsize=7,
            )
    axes.set_yticks(range(table.num_ranks), [f"rank {rank}" for rank in range(table.num_ranks)])
    axes.invert_yaxis()
    axes.set_xlim(0, total)
    axes.grid(False)
    axes.set_xlabel("time, in forward passes through a stage")
    text, ideal = expected_bubble(table.name, table.num_ranks, table.num_microbatches, per_rank)
    shares = bubble_fractions(slots)
    axes.set_title(f"{table.name}: idle {100 * max(shares):.1f} % ({text} = {100 * ideal:.1f} %)")
    kinds = sorted({slot.action.kind for row in slots for slot in row}, key="FBIW".index)
    figure.legend(
        handles=[Patch(color=COLORS[kind], label=WORDS[kind]) for kind in kinds],
        loc="outside lower center",
        ncols=len(kinds),
    )
    return figure
