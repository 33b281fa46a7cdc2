"""The lines with which a run announces its pipeline: the cuts, the schedule, and the differences
from one device.
"""

from __future__ import annotations

from torch import nn

from shoal.platform.torch_private.module_state import BatchNormBase
from shoal.strategies.pipeline.plan import StagePlan
from shoal.strategies.pipeline.schedule_table import ScheduleTable
from shoal.strategies.pipeline.schedule_timing import bubble_fractions, timeline
from shoal.strategies.wrap_units import has_dropout


def summary_lines(
    model: nn.Module,
    table: ScheduleTable,
    stage_plan: StagePlan,
    num_samples: int,
    microbatches_chosen: bool,
) -> list[str]:
    """Describe a pipeline.

    Args:
        num_samples: of a batch on one rank.
        microbatches_chosen: the user has not given their number.
    """
    unit = "time" if stage_plan.measured else "parameters"
    fractions = " | ".join(f"{100 * fraction:.0f} %" for fraction in stage_plan.cost_fractions)
    idle = 100 * max(bubble_fractions(timeline(table)))
    chosen = " (chosen)" if microbatches_chosen else ""
    lines = [
        f"pipeline of {table.num_ranks} ranks, cut before {', '.join(stage_plan.names)}: {unit} "
        f"{fractions}",
        f"{table.name}, {table.num_microbatches} micro-batches{chosen} of {num_samples} rows: "
        f"stages of equal time would be idle for {idle:.0f} % of a step",
    ]
    if table.num_microbatches > max(num_samples, 1):
        lines.append(
            f"{num_samples} samples fill {num_samples} of {table.num_microbatches} micro-batches; "
            "the rest is idle time"
        )
    return lines + _numeric_notes(model, table.num_microbatches)


def _numeric_notes(model: nn.Module, num_microbatches: int) -> list[str]:
    """Name the modules whose numbers differ from one device by design."""
    notes = []
    norms = [name for name, m in model.named_modules() if isinstance(m, BatchNormBase)]
    if norms and num_microbatches > 1:
        notes.append(
            f"note: BatchNorm ({norms[0]} and {len(norms) - 1} more) normalises over one "
            "micro-batch at a time, so gradients differ from one device by design, and its running "
            "statistics take an update from each; GroupNorm has no such difference."
        )
    dropouts = [name for name, m in model.named_modules() if has_dropout(m)]
    if dropouts:
        notes.append(
            f"note: dropout ({dropouts[0]}, ...) draws for one micro-batch at a time, in each "
            "block from a stream of its own: same law, other masks."
        )
    return notes
