"""`shoal plot`: a figure with the curves of one run, or of several runs for comparison.

      loss             top-1 accuracy or perplexity
      learning rate    samples per second

A quantity that no run has gets no panel.
"""

from __future__ import annotations

import io
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shoal.config import read
from shoal.errors import ConfigError, ShoalError, raise_problems
from shoal.loggers.metrics_file import NAME, read_metrics
from shoal.platform.files import atomic_write
from shoal.platform.optional_packages import missing, missing_for

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]
PANELS = {
    "loss": "Loss",
    "top1": "Top-1 accuracy (%)",
    "perplexity": "Perplexity",
    "lr": "Learning rate",
    "samples_per_s": "Samples per second",
}
# Okabe and Ito, "Color Universal Design", 2008: colour-blind readers can tell them apart too. Their
# yellow is left out, for it is too pale on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", ":", "-.")
"""Styles for more runs than there are colours: the first colours again, dashed."""
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


@dataclass(frozen=True)
class Curve:
    """One quantity over steps. Both arrays are float64, (points,)."""

    steps: Floats
    values: Floats


@dataclass(frozen=True)
class RunMetrics:
    """The metrics of one run.

    Attributes:
        name: its directory, as it was given.
        curves: (kind, name of the quantity) -> curve; the kind is "train" or "validation".
        unreadable_lines: number of such lines in its metrics.jsonl.
        soft_targets: the method that makes its training loss another quantity than its validation
            loss, such as label smoothing; "" for none.
    """

    name: str
    curves: dict[tuple[str, str], Curve]
    unreadable_lines: int
    soft_targets: str = ""

    @property
    def has_epochs(self) -> bool:
        """Return whether there was an evaluation. Evaluations tell how long an epoch is."""
        ends = self.curves.get(("validation", "epoch"))
        return ends is not None and bool(ends.values[-1] > 0 and ends.steps[-1] > 0)

    def epochs_at(self, steps: Floats) -> Floats:
        """Convert steps to epochs, both (points,); for runs that have epochs."""
        ends = self.curves["validation", "epoch"]
        known_steps = np.append(0.0, ends.steps)
        known_epochs = np.append(0.0, ends.values)
        # `interp` is constant after the last evaluation; add epochs of mean length there.
        beyond = np.maximum(0.0, steps - known_steps[-1]) * known_epochs[-1] / known_steps[-1]
        return np.asarray(np.interp(steps, known_steps, known_epochs) + beyond)


def plot(runs: Sequence[Path], output: Path) -> None:
    """Draw loss, accuracy or perplexity, learning rate and throughput of runs into a file.

    Args:
        runs: run directories.
        output: a .png, .svg or .pdf file; an old one is replaced atomically.

    Raises:
        ConfigError: a directory is no run or holds no records yet, or the suffix is unknown.
    """
    check_can_draw(output)
    metrics = read_runs(runs)
    for run in metrics:
        if run.unreadable_lines:
            lines = "line" if run.unreadable_lines == 1 else "lines"
            print(
                f"note: {run.name}: {run.unreadable_lines} unreadable {lines} left out",
                file=sys.stderr,
            )
    from matplotlib import rc_context

    with rc_context(STYLE):
        write_figure(_draw(metrics), output)


def plot_or_note(run: Path, output: Path, note: Callable[[str], None]) -> None:
    """Draw one run as `plot` does. A failure is a note."""
    if sentences := missing("matplotlib"):
        note(f"no curves were drawn: {sentences[0]}")
        return
    try:
        plot([run], output)
    except (ShoalError, OSError) as error:
        note(f"no curves were drawn: {error}")


def check_can_draw(output: Path) -> None:
    """Raise ConfigError if no figure can be drawn here, or not into this file."""
    raise_problems(missing_for(f"-o {output}", ("matplotlib",)))
    if output.suffix not in SUFFIXES:
        raise ConfigError(
            f"-o {output}: unknown suffix '{output.suffix}'; known: {' '.join(SUFFIXES)}"
        )
    if output.parent.exists() and not output.parent.is_dir():
        raise ConfigError(f"-o {output}: {output.parent} is no directory")


def write_figure(figure: Figure, output: Path) -> None:
    """Write a figure in the format of the suffix, atomically. Equal figures give equal bytes."""
    data = io.BytesIO()
    # Without these entries, the files would contain the date.
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(output.suffix)
    figure.savefig(data, format=output.suffix[1:], metadata=metadata, facecolor="white")
    output.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(output, many_writers=True) as file:
        file.write(data.getvalue())


def read_runs(directories: Sequence[Path]) -> list[RunMetrics]:
    """Read run directories.

    Raises:
        ConfigError: names every directory that is no run, or that has no records yet.
    """
    raise_problems(
        [
            f"{directory}: no run directory, it holds no {NAME}; give the --out of a run, such as "
            "runs/digits"
            for directory in directories
            if not (directory / NAME).is_file()
        ]
    )
    runs = [_read(directory) for directory in directories]
    raise_problems(
        [
            f"{run.name}/{NAME}: no records yet; wait for the first logged step"
            for run in runs
            if not run.curves
        ]
    )
    return runs


def _read(directory: Path) -> RunMetrics:
    """Read a curve for each quantity that is a number in some record."""
    records, unreadable_lines = read_metrics(directory / NAME)
    points: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    for record in (each for each in records if each["kind"] in ("train", "validation")):
        for quantity, value in record.items():
            if quantity != "step" and isinstance(value, (int, float)):
                points[record["kind"], quantity].append((record["step"], value))
    curves = {key: Curve(*np.array(each, dtype=np.float64).T) for key, each in points.items()}
    return RunMetrics(str(directory), curves, unreadable_lines, _targets_of(directory))


def _targets_of(directory: Path) -> str:
    """Read it from the run's configuration; "" if that is missing or of another version."""
    try:
        return read(str(directory / "config.yaml")).job.train.soft_targets
    except ConfigError:
        return ""


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
        # The last of an odd number of panels is as wide as two.
        is_wide = index == len(names) - 1 and index % 2 == 0
        cell = grid[index // 2, :] if is_wide else grid[index // 2, index % 2]
        axes = figure.add_subplot(cell, sharex=figure.axes[0] if figure.axes else None)
        for number, run in enumerate(runs):
            _draw_run(axes, name, run, _line_style(number, len(runs)), in_epochs)
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
    # A language model has both; perplexity says more.
    return name in quantities and not (name == "top1" and "perplexity" in quantities)


def _line_style(index: int, num_runs: int) -> dict[str, dict[str, Any]]:
    """Return the styles of a run's training and validation curves.

    A single run has two colours; of several runs, each has one colour. Of up to three runs, the
    earlier ones have wider lines: equal curves then show as stripes, and none hides another.
    """
    color = COLORS[index % len(COLORS)]
    train_color, validation_color = COLORS[:2] if num_runs == 1 else (color, color)
    dashes = DASHES[index // len(COLORS) % len(DASHES)]
    width = 2.0 + (1.5 * (num_runs - 1 - index) if num_runs <= 3 else 0)
    return {
        "train": {"color": train_color, "linestyle": dashes, "linewidth": 1.2, "alpha": 0.8},
        "validation": {
            "color": validation_color,
            "linestyle": dashes,
            "linewidth": width,
            "marker": "o",
        },
    }


def _draw_run(
    axes: Axes, name: str, run: RunMetrics, styles: dict[str, dict[str, Any]], in_epochs: bool
) -> None:
    """Draw one quantity of a run, for training and for validation."""
    for kind, style in styles.items():
        curve = run.curves.get((kind, name))
        if curve is None:
            continue
        x = run.epochs_at(curve.steps) if in_epochs else curve.steps
        if kind == "validation":
            # Many markers would hide the line.
            size = style["linewidth"] + 2 if len(curve.values) <= 40 else 0
            axes.plot(x, curve.values, **style, markersize=size, zorder=3)
        elif name == "lr":
            # A learning rate has no noise, so it is not smoothed.
            width = styles["validation"]["linewidth"]
            axes.plot(x, curve.values, **style | {"linewidth": width, "alpha": 1.0})
        else:
            axes.plot(x, curve.values, color=style["color"], linewidth=0.8, alpha=0.25)
            axes.plot(x, _running_mean(curve), **style)


def _smoothing_width(curve: Curve) -> int:
    """Return the number of points of the running mean: a fortieth of all. 1 smooths nothing."""
    return max(1, len(curve.values) // 40)


def _running_mean(curve: Curve) -> Floats:
    """Return the mean of the points around each point, centred; of fewer points at the ends."""
    width = _smoothing_width(curve)
    weights = np.ones(width)
    total = np.convolve(curve.values, weights, mode="same")
    return np.asarray(total / np.convolve(np.ones_like(curve.values), weights, mode="same"))


def _scale(axes: Axes, name: str) -> None:
    """Set limits, scale and tick labels of a panel."""
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
    """Return the name of training curves; it says if they are smoothed."""
    curves = [curve for run in runs if (curve := run.curves.get(("train", "loss"))) is not None]
    smoothed = any(_smoothing_width(curve) > 1 for curve in curves)
    return "training (running mean; pale: as measured)" if smoothed else "training"


def _soft_targets(runs: Sequence[RunMetrics]) -> str:
    """Return a note on losses if training and validation loss cannot be compared."""
    distinct = {run.soft_targets for run in runs}
    if distinct == {""}:
        return ""
    if len(distinct) == 1:
        return f"training with {distinct.pop()}"
    return "training: the runs have different targets"


def _legend(figure: Figure, runs: Sequence[RunMetrics]) -> None:
    """Draw a legend above all panels.

    A single run gives its two curves, under its name. Several runs give one entry each, and two
    grey entries for training and validation.
    """
    from matplotlib.lines import Line2D

    styles_of_runs = [_line_style(index, len(runs)) for index in range(len(runs))]
    labels = [_training_label(runs), "validation"]
    title = None
    if len(runs) == 1:
        styles = list(styles_of_runs[0].values())
        title = runs[0].name
    else:
        grey = {"color": "#555555", "linestyle": "-"}
        styles = [by_kind["validation"] for by_kind in styles_of_runs]
        styles += [style | grey for style in styles_of_runs[-1].values()]
        labels = [*(run.name for run in runs), *labels]
    lines = [Line2D([], [], **style, markersize=style["linewidth"] + 2) for style in styles]
    # About 110 characters fit into a row; a line and its gaps take as much as 8.
    columns = max(1, min(len(labels), 110 // (max(map(len, labels)) + 8)))
    figure.legend(
        lines,
        labels,
        loc="outside upper center",
        ncols=columns,
        title=title,
        title_fontproperties={"size": 14, "weight": "bold"},
    )
