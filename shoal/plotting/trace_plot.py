"""`shoal trace -o`: where the time of a step went, and what one step looked like on each rank."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.plotting.curves import STYLE, refuse_suffix, write_figure
from shoal.trace.breakdown import (
    Breakdown,
    Wait,
    components_of,
    group_collectives,
    wait_of,
    waits_in,
)
from shoal.trace.chrome import Trace, assign_lanes
from shoal.trace.intervals import Interval, difference, intersection, union
from shoal.trace.report import conclusions
from shoal.trace.span import BACKWARD, DATA, EXCHANGE, FORWARD, OPTIMIZER, STEP, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, as in shoal.plotting.curves; what is lost is warm, what is not is cool.
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
WORDS = {"communication": "exposed communication", "waiting": "waiting for the slowest"}
MOST_BARS, MOST_LINES, MOST_LANES = 32, 8, 3
HIDDEN, EARLY = "#B9A3C9", "#F2BFA0"


def save(trace: Trace, found: Breakdown, output: Path) -> None:
    """Draw a trace into a .png, .svg or .pdf. Raises ConfigError: another suffix."""
    refuse_suffix(output)
    from matplotlib import rc_context

    with rc_context(STYLE):
        write_figure(_figure(trace, found), output)


def _figure(trace: Trace, found: Breakdown) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    bars = sorted(found.shares)[:MOST_BARS]
    shown = _shown(found)
    heights = (0.75 + 0.34 * len(bars), 0.75 + 0.78 * len(shown))
    figure = Figure(figsize=(11, sum(heights) + 1.45), dpi=150, layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=heights)
    _bars(above, found, bars)
    _steps(below, trace, shown)
    figure.suptitle(
        "\n".join(conclusions(trace, found)[:1]), x=0.012, ha="left", fontsize=11, color="#444444"
    )
    handles = [Patch(color=COLORS[part], label=WORDS.get(part, part)) for part in ORDER]
    handles.append(Patch(color=HIDDEN, label="exchange on its way"))
    handles.append(Patch(color=EARLY, label="not all have come"))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles),
        fontsize=8.5,
        handlelength=1.2,
    )
    return figure


def _shown(found: Breakdown) -> list[int]:
    """The first ranks, the slowest among them."""
    ranks = sorted(found.shares)[:MOST_LINES]
    if found.slowest is not None and found.slowest.rank not in ranks:
        ranks[-1] = found.slowest.rank
    return ranks


def _bars(axes: Axes, found: Breakdown, ranks: list[int]) -> None:
    longest = max((found.shares[rank].step_s for rank in ranks), default=0.0)
    for row, rank in enumerate(ranks):
        left = 0.0
        for part in ORDER:
            width = 1e3 * found.shares[rank].parts_s[part]
            axes.barh(
                row,
                width,
                left=left,
                height=0.7,
                color=COLORS[part],
                edgecolor="white",
                linewidth=0.6,
            )
            if width > 0.06e3 * longest:
                _text_inside_bar(axes, left + width / 2, row, f"{width:.3g}", part != "other")
            left += width
    _rows(axes, [f"rank {rank}" for rank in ranks])
    axes.set_xlim(0, 1e3 * longest * 1.005)
    axes.set_title(f"A step's time, mean of {found.steps}" if found.steps > 1 else "A step's time")
    axes.set_xlabel("milliseconds")


def _steps(axes: Axes, trace: Trace, ranks: list[int]) -> None:
    """The last traced step, for by then all is warm: phases above, exchanges below, of each
    rank.
    """
    window = _last_step(trace, ranks)
    waits, met = waits_in(trace.spans), group_collectives(trace.spans)
    for row, rank in enumerate(ranks):
        mine = [
            span
            for span in trace.spans[rank]
            if span.end_ns > window[0] and span.start_ns < window[1]
        ]
        _phases(axes, mine, waits[rank], window, row)
        flown = [span for span in mine if span.kind == EXCHANGE]
        lanes = assign_lanes(flown)
        count = min(max(lanes.values(), default=0) + 1, MOST_LANES)
        for span in flown:
            if lanes[id(span)] < count:
                _exchange(
                    axes,
                    span,
                    wait_of(span, met),
                    window,
                    row + 0.18 + 0.22 * lanes[id(span)] / count,
                    0.2 / count,
                )
    _rows(axes, [f"rank {rank}" for rank in ranks])
    axes.set_xlim(0, (window[1] - window[0]) / 1e6)
    axes.set_title(
        f"Step {trace.steps[-1]} on "
        f"{'each rank' if len(ranks) == len(trace.spans) else 'some ranks'}"
    )
    axes.set_xlabel("milliseconds")


def _phases(axes: Axes, mine: list[Span], waits: list[Wait], window: Interval, row: float) -> None:
    parts = components_of(mine, waits)
    blocked = union([*parts["communication"], *parts["waiting"]])
    for span in mine:
        if span.kind in PHASES:
            _bar(axes, span.interval, window, row - 0.36, 0.46, PHASES[span.kind])
            free = difference(intersection([span.interval], [window]), blocked)
            start, end = max(free, key=lambda one: one[1] - one[0], default=(0, 0))
            if end - start > 0.06 * (window[1] - window[0]):
                _text_inside_bar(
                    axes, ((start + end) / 2 - window[0]) / 1e6, row - 0.13, _short(span), True
                )
    for part in ("communication", "waiting"):
        for stretch in intersection(parts[part], [window]):
            _bar(axes, stretch, window, row - 0.36, 0.46, COLORS[part])


def _exchange(
    axes: Axes, span: Span, wait: Wait | None, window: Interval, low: float, height: float
) -> None:
    _bar(axes, span.interval, window, low, height, HIDDEN)
    if wait is not None:
        _bar(axes, wait.stretch, window, low, height, EARLY)


def _bar(
    axes: Axes, stretch: Interval, window: Interval, low: float, height: float, color: str
) -> None:
    start, end = max(stretch[0], window[0]), min(stretch[1], window[1])
    style: Any = {"color": color, "linewidth": 0, "align": "edge"}
    if end > start:
        axes.barh(low, (end - start) / 1e6, left=(start - window[0]) / 1e6, height=height, **style)


def _last_step(trace: Trace, ranks: list[int]) -> Interval:
    steps = [span for rank in ranks for span in trace.spans[rank] if span.kind == STEP]
    last = [
        max((s for s in trace.spans[rank] if s.kind == STEP), key=lambda s: s.end_ns).interval
        for rank in ranks
    ]
    return (
        union([(min(start for start, _ in last), max(end for _, end in last))])[0]
        if steps
        else (0, 1)
    )


def _short(span: Span) -> str:
    return span.name.split()[0]


def _rows(axes: Axes, names: list[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.grid(axis="y", visible=False)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)


def _text_inside_bar(axes: Axes, x: float, y: float, text: str, light: bool) -> None:
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
