"""`shoal plot`: the curves of one run, or of several in comparison, as a picture."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.errors import ConfigError
from shoal.platform.files import atomic_write
from shoal.plotting.metrics_reader import Curve, Floats, RunMetrics, read_runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = {
    "loss": "Loss",
    "top1": "Top-1 accuracy (%)",
    "perplexity": "Perplexity",
    "lr": "Learning rate",
    "samples_per_s": "Samples per second",
}
# Okabe and Ito, "Color Universal Design", 2008: told apart by colour-blind readers too. Yellow is
# too pale on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", ":", "-.")  # for more runs than colours
SUFFIXES = (".png", ".svg", ".pdf")
STYLE: Any = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "legend.frameon": False,
    "svg.hashsalt": "shoal",  # the same run gives the same file
}


def plot(runs: Sequence[Path], output: Path) -> None:
    """Draws loss, accuracy or perplexity, learning rate and throughput of runs; what no run has
    gets no panel.

    Args:
        runs: run directories.
        output: a .png, .svg or .pdf; replaced as a whole.

    Raises:
        ConfigError: a directory is no run or holds no records yet, or the suffix is unknown.
    """
    refuse_suffix(output)
    read = read_runs(runs)
    for run in read:
        if run.unreadable_lines:
            lines = "line" if run.unreadable_lines == 1 else "lines"
            print(
                f"note: {run.name}: {run.unreadable_lines} unreadable {lines} left out",
                file=sys.stderr,
            )
    from matplotlib import rc_context

    with rc_context(STYLE):
        write_figure(_draw(read), output)


def refuse_suffix(output: Path) -> None:
    """Raise ConfigError where pictures have no such format."""
    if output.suffix not in SUFFIXES:
        raise ConfigError(
            [f"-o {output}: unknown suffix '{output.suffix}'; known: {' '.join(SUFFIXES)}"]
        )


def write_figure(figure: Figure, output: Path) -> None:
    """Write a picture by its suffix, as a whole; the same picture gives the same bytes."""
    picture = io.BytesIO()
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(output.suffix)
    figure.savefig(picture, format=output.suffix[1:], metadata=metadata, facecolor="white")
    output.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(output, many_writers=True) as file:
        file.write(picture.getvalue())


def _draw(runs: Sequence[RunMetrics]) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    names = [name for name in PANELS if any(_is_plottable(name, run) for run in runs)]
    rows = (len(names) + 1) // 2
    figure = Figure(
        figsize=(10, 0.9 + 2.9 * rows),
        dpi=150,
        layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1),
    )
    grid = figure.add_gridspec(rows, 2)
    in_epochs = all(run.has_epochs for run in runs)
    for index, name in enumerate(names):
        alone = index == len(names) - 1 and index % 2 == 0
        cell = grid[index // 2, :] if alone else grid[index // 2, index % 2]
        axes = figure.add_subplot(cell, sharex=figure.axes[0] if figure.axes else None)
        for place, run in enumerate(runs):
            _draw_run(axes, name, run, _line_style(place, len(runs)), in_epochs)
        axes.set_title(PANELS[name])
        if name == "loss":
            axes.set_title(_soft_targets(runs), loc="right", size=9, weight="normal")
        _scale(axes, name)
        if index >= len(names) - 2:
            axes.set_xlabel("epoch" if in_epochs else "step")
    _legend(figure, runs)
    return figure


def _is_plottable(name: str, run: RunMetrics) -> bool:
    quantities = {quantity for _, quantity in run.curves}
    return name in quantities and not (name == "top1" and "perplexity" in quantities)


def _line_style(place: int, runs: int) -> dict[str, dict[str, Any]]:
    """How a run's training and validation are drawn: in two colours if it is alone, else in the
    colour of the run.

    Of a few runs the first ones have wider lines, so that equal curves show as stripes and none
    hides another."""
    train, validation = (COLORS[:2]) if runs == 1 else (COLORS[place % len(COLORS)],) * 2
    dashes = DASHES[place // len(COLORS) % len(DASHES)]
    width = 2.0 + (1.5 * (runs - 1 - place) if runs <= 3 else 0)
    return {
        "train": {"color": train, "linestyle": dashes, "linewidth": 1.2, "alpha": 0.8},
        "validation": {"color": validation, "linestyle": dashes, "linewidth": width, "marker": "o"},
    }


def _draw_run(
    axes: Axes, name: str, run: RunMetrics, look: dict[str, dict[str, Any]], in_epochs: bool
) -> None:
    for kind, style in look.items():
        curve = run.curves.get((kind, name))
        if curve is None:
            continue
        x = run.epochs_at(curve.steps) if in_epochs else curve.steps
        if kind == "validation":
            size = style["linewidth"] + 2 if len(curve.values) <= 40 else 0
            axes.plot(x, curve.values, **style, markersize=size, zorder=3)
        elif name == "lr":
            axes.plot(
                x,
                curve.values,
                **style | {"linewidth": look["validation"]["linewidth"], "alpha": 1.0},
            )
        else:
            axes.plot(x, curve.values, color=style["color"], linewidth=0.8, alpha=0.25)
            axes.plot(x, _running_mean(curve), **style)


def _smoothing_width(curve: Curve) -> int:
    """Return how many points a running mean is over: a fortieth of all; 1 leaves the curve as
    it is.
    """
    return max(1, len(curve.values) // 40)


def _running_mean(curve: Curve) -> Floats:
    """Average over the points around each, centred; fewer at the ends."""
    width = _smoothing_width(curve)
    weights = np.ones(width)
    total = np.convolve(curve.values, weights, mode="same")
    return np.asarray(total / np.convolve(np.ones_like(curve.values), weights, mode="same"))


def _scale(axes: Axes, name: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    values = np.concatenate([np.asarray(line.get_ydata(), dtype=np.float64) for line in axes.lines])
    if name in ("lr", "samples_per_s"):
        axes.set_ylim(bottom=0)
    elif name in ("loss", "perplexity") and values.min() > 0 and values.max() / values.min() > 30:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=9))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.margins(x=0.02)


def _training_label(runs: Sequence[RunMetrics]) -> str:
    """Name the training curve; say so where it is not what was measured."""
    curves = [curve for run in runs if (curve := run.curves.get(("train", "loss"))) is not None]
    smoothed = any(_smoothing_width(curve) > 1 for curve in curves)
    return "training (running mean; pale: as measured)" if smoothed else "training"


def _soft_targets(runs: Sequence[RunMetrics]) -> str:
    """Say beside the title of the losses why training and validation cannot be compared."""
    distinct = {run.soft_targets for run in runs}
    if distinct == {""}:
        return ""
    if len(distinct) == 1:
        return f"training with {distinct.pop()}"
    return "training: the runs have different targets"


def _legend(figure: Figure, runs: Sequence[RunMetrics]) -> None:
    from matplotlib.lines import Line2D

    looks = [_line_style(place, len(runs)) for place in range(len(runs))]
    training = _training_label(runs)
    if len(runs) == 1:
        styles, labels, title = list(looks[0].values()), [training, "validation"], runs[0].name
    else:
        neutral = [style | {"color": "#555555", "linestyle": "-"} for style in looks[-1].values()]
        styles = [*(look["validation"] for look in looks), *neutral]
        labels, title = [*(run.name for run in runs), training, "validation"], None
    lines = [Line2D([], [], **style, markersize=style["linewidth"] + 2) for style in styles]
    columns = max(1, min(len(labels), 110 // (max(map(len, labels)) + 8)))
    heading = {"size": 14, "weight": "bold"}
    figure.legend(
        lines,
        labels,
        loc="outside upper center",
        ncols=columns,
        title=title,
        title_fontproperties=heading,
    )
