"""`shoal trace -o`: a figure of a trace.

above   one bar for each rank: the components of its mean step
below   the last traced step of some ranks: phases, and exchanges under them
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.plotting.curves import STYLE, refuse_suffix, write_figure
from shoal.trace.breakdown import (
    Breakdown,
    Collectives,
    Wait,
    components_of,
    group_collectives,
    wait_of,
    waits_in,
)
from shoal.trace.chrome import Trace, assign_lanes
from shoal.trace.intervals import Interval, difference, intersection, union
from shoal.trace.recorder import BACKWARD, DATA, EXCHANGE, FORWARD, OPTIMIZER, STEP, Span
from shoal.trace.report import conclusions

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, as in shoal.plotting.curves. Lost time has warm colours, used time cool
# ones.
COLORS = {
    "compute": "#0072B2",
    "optimizer": "#56B4E9",
    "data": "#E69F00",
    "communication": "#CC79A7",
    "waiting": "#D55E00",
    "other": "#C8C8C8",
}
ORDER = ("compute", "optimizer", "data", "communication", "waiting", "other")
PHASES = {FORWARD: "#0072B2", BACKWARD: "#4A9ACB", OPTIMIZER: "#56B4E9", DATA: "#E69F00"}
LABELS = {"communication": "exposed communication", "waiting": "waiting for the slowest"}
TRANSFER_COLOR = "#B9A3C9"
WAIT_COLOR = "#F2BFA0"
MAX_BARS = 32
MAX_STEP_ROWS = 8
MAX_LANES = 3
MIN_LABELLED_FRACTION = 0.06
"""A bar gets a text if it is at least this fraction of the axis: the text would not fit else."""
PHASE_HEIGHT = 0.46


def save(trace: Trace, breakdown: Breakdown, output: Path) -> None:
    """Draw a trace into a file. Raises ConfigError: the suffix is unknown."""
    refuse_suffix(output)
    from matplotlib import rc_context

    with rc_context(STYLE):
        write_figure(_figure(trace, breakdown), output)


def _figure(trace: Trace, breakdown: Breakdown) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    bar_ranks = sorted(breakdown.shares)[:MAX_BARS]
    step_ranks = _ranks_of_step(breakdown)
    heights = (0.75 + 0.34 * len(bar_ranks), 0.75 + 0.78 * len(step_ranks))
    figure = Figure(figsize=(11, sum(heights) + 1.45), dpi=150, layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=heights)
    _draw_components(above, breakdown, bar_ranks)
    _draw_last_step(below, trace, step_ranks)
    figure.suptitle(
        "\n".join(conclusions(trace, breakdown)[:1]),
        x=0.012,
        ha="left",
        fontsize=11,
        color="#444444",
    )
    handles = [Patch(color=COLORS[part], label=LABELS.get(part, part)) for part in ORDER]
    handles.append(Patch(color=TRANSFER_COLOR, label="exchange on its way"))
    handles.append(Patch(color=WAIT_COLOR, label="not all have come"))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles),
        fontsize=8.5,
        handlelength=1.2,
    )
    return figure


def _ranks_of_step(breakdown: Breakdown) -> list[int]:
    """Return the first ranks; the slowest replaces the last of them if it is not among them."""
    ranks = sorted(breakdown.shares)[:MAX_STEP_ROWS]
    if breakdown.slowest is not None and breakdown.slowest.rank not in ranks:
        ranks[-1] = breakdown.slowest.rank
    return ranks


def _draw_components(axes: Axes, breakdown: Breakdown, ranks: list[int]) -> None:
    """Draw a stacked bar of each rank's mean step, in milliseconds."""
    longest_s = max((breakdown.shares[rank].step_s for rank in ranks), default=0.0)
    min_width = MIN_LABELLED_FRACTION * 1e3 * longest_s
    for row, rank in enumerate(ranks):
        left = 0.0
        for part in ORDER:
            width = 1e3 * breakdown.shares[rank].parts_s[part]
            axes.barh(
                row,
                width,
                left=left,
                height=0.7,
                color=COLORS[part],
                edgecolor="white",
                linewidth=0.6,
            )
            if width > min_width:
                _draw_text(axes, left + width / 2, row, f"{width:.3g}", part != "other")
            left += width
    _label_rows(axes, ranks)
    axes.set_xlim(0, 1e3 * longest_s * 1.005)
    mean = f", mean of {breakdown.steps}" if breakdown.steps > 1 else ""
    axes.set_title(f"A step's time{mean}")
    axes.set_xlabel("milliseconds")


def _draw_last_step(axes: Axes, trace: Trace, ranks: list[int]) -> None:
    """Draw phases and exchanges of each rank in the last traced step: caches are warm by then."""
    window = _last_step(trace, ranks)
    waits = waits_in(trace.spans)
    collectives = group_collectives(trace.spans)
    for row, rank in enumerate(ranks):
        spans = [
            span
            for span in trace.spans[rank]
            if span.end_ns > window[0] and span.start_ns < window[1]
        ]
        _draw_phases(axes, spans, waits[rank], window, row)
        _draw_exchanges(axes, spans, collectives, window, row)
    _label_rows(axes, ranks)
    axes.set_xlim(0, (window[1] - window[0]) / 1e6)
    title_end = "each rank" if len(ranks) == len(trace.spans) else "some ranks"
    axes.set_title(f"Step {trace.steps[-1]} on {title_end}")
    axes.set_xlabel("milliseconds")


def _draw_phases(
    axes: Axes, spans: list[Span], waits: list[Wait], window: Interval, row: float
) -> None:
    """Draw the phases of a rank, and over them the times in which it is blocked."""
    components = components_of(spans, waits)
    blocked = union([*components["communication"], *components["waiting"]])
    bottom = row - 0.36
    min_length = MIN_LABELLED_FRACTION * (window[1] - window[0])
    for span in spans:
        if span.kind not in PHASES:
            continue
        _draw_bar(axes, span.interval, window, bottom, PHASE_HEIGHT, PHASES[span.kind])
        # The name goes where no bar of a wait will cover it.
        free = difference(intersection([span.interval], [window]), blocked)
        start, end = max(free, key=lambda interval: interval[1] - interval[0], default=(0, 0))
        if end - start > min_length:
            middle = ((start + end) / 2 - window[0]) / 1e6
            _draw_text(axes, middle, row - 0.13, span.name.split()[0], True)
    for part in ("communication", "waiting"):
        for interval in intersection(components[part], [window]):
            _draw_bar(axes, interval, window, bottom, PHASE_HEIGHT, COLORS[part])


def _draw_exchanges(
    axes: Axes, spans: list[Span], collectives: Collectives, window: Interval, row: float
) -> None:
    """Draw the exchanges of a rank in lanes; those beyond MAX_LANES are left out."""
    exchanges = [span for span in spans if span.kind == EXCHANGE]
    lanes = assign_lanes(exchanges)
    num_lanes = min(max(lanes.values(), default=0) + 1, MAX_LANES)
    for span in exchanges:
        lane = lanes[id(span)]
        if lane >= num_lanes:
            continue
        bottom = row + 0.18 + 0.22 * lane / num_lanes
        height = 0.2 / num_lanes
        _draw_bar(axes, span.interval, window, bottom, height, TRANSFER_COLOR)
        wait = wait_of(span, collectives)
        if wait is not None:
            _draw_bar(axes, wait.stretch, window, bottom, height, WAIT_COLOR)


def _draw_bar(
    axes: Axes, interval: Interval, window: Interval, bottom: float, height: float, color: str
) -> None:
    """Draw the part of an interval (ns) that lies in the window, in milliseconds."""
    start = max(interval[0], window[0])
    end = min(interval[1], window[1])
    style: Any = {"color": color, "linewidth": 0, "align": "edge"}
    if end > start:
        width = (end - start) / 1e6
        axes.barh(bottom, width, left=(start - window[0]) / 1e6, height=height, **style)


def _last_step(trace: Trace, ranks: list[int]) -> Interval:
    """Return the time from the first begin to the last end of the last step, over all ranks."""
    last_steps = []
    for rank in ranks:
        steps = [span for span in trace.spans[rank] if span.kind == STEP]
        if steps:
            last_steps.append(max(steps, key=lambda span: span.end_ns))
    if not last_steps:
        return (0, 1)
    return min(span.start_ns for span in last_steps), max(span.end_ns for span in last_steps)


def _label_rows(axes: Axes, ranks: list[int]) -> None:
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.set_ylim(len(ranks) - 0.45, -0.55)
    axes.grid(axis="y", visible=False)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)


def _draw_text(axes: Axes, x: float, y: float, text: str, light: bool) -> None:
    axes.text(
        x,
        y,
        text,
        ha="center",
        va="center",
        fontsize=8,
        color="white" if light else "#333333",
        clip_on=True,
    )
