"""A picture of one plan: the timeline of its step, and the memory of its fullest rank by kind.

rank 0 compute    ████████ ██████████ ██
rank 0 messages           ██         █
                  seconds ->
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.plotting.curves import COLORS, STYLE, write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from shoal.planner.strategy_search import Plan

KINDS = ("parameters", "gradients", "optimizer", "activations", "gathered")
MOST_QUEUES = 40
"""Rows of the timeline; a longer pipeline is cut off."""


def plot_plan(plan: Plan, output: Path) -> None:
    """Draw a plan into a file.

    Args:
        plan: one that fits, so its time is known.
        output: one that `check_can_draw` has seen; an old file is replaced atomically.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    assert plan.time is not None
    with rc_context(STYLE):
        queues = list(dict.fromkeys(task.queue for task in plan.time.tasks))[:MOST_QUEUES]
        height = 1.2 + 0.45 * len(queues)
        figure = Figure(figsize=(11, height + 2.4), layout="constrained")
        above, below = figure.subplots(2, 1, height_ratios=[height, 1.9])
        _draw_timeline(above, plan, queues)
        _draw_memory(below, plan)
        write_figure(figure, output)


def _draw_timeline(axes: Axes, plan: Plan, queues: list[str]) -> None:
    assert plan.time is not None
    scale, unit = (1e3, "ms") if plan.seconds < 1 else (1.0, "s")
    tasks = list(zip(plan.time.tasks, *plan.time.timeline, strict=True))
    labels = list(dict.fromkeys(task.label for task, _, _ in tasks if task.work_s))
    for label, color in zip(labels, COLORS * len(labels), strict=False):
        shown = [each for each in tasks if each[0].label == label and each[0].queue in queues]
        axes.barh(
            [queues.index(task.queue) for task, _, _ in shown],
            [(end - start) * scale for _, start, end in shown],
            left=[start * scale for _, start, _ in shown],
            height=0.7,
            color=color,
            edgecolor="white" if label == "compute" else color,  # a short message is a line
            linewidth=0.6,
            label=label,
        )
    axes.set_yticks(range(len(queues)), queues)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.set_title(f"{plan.strategy}: a step of {plan.seconds * scale:.3g} {unit} ±{plan.band:.0%}")
    _finish(axes)


def _draw_memory(axes: Axes, plan: Plan) -> None:
    """Draw one bar of all kinds, and the limit where it is near."""
    scale, unit = (2**30, "GiB") if plan.memory.total >= 2**29 else (2**20, "MiB")
    left = 0.0
    for kind, color in zip(KINDS, COLORS, strict=False):
        size = getattr(plan.memory, kind) / scale
        axes.barh([0], [size], left=left, color=color, height=0.6, label=kind)
        left += size
    if plan.memory_limit < 2 * plan.memory.total:
        axes.axvline(plan.memory_limit / scale, color="black", linestyle="--", label="limit")
    axes.set_yticks([])
    axes.set_xlabel(unit)
    axes.set_title(f"Memory of the fullest rank: {left:.3g} {unit}")
    _finish(axes)


def _finish(axes: Axes) -> None:
    axes.set_axisbelow(True)
    axes.grid(axis="y", visible=False)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
