"""Output of a run on rank 0: notes, numbers as people read them, the closing table, the log with
its loggers, and the display, a bar on a terminal, plain lines elsewhere.

epoch 3/15 ━━━━━━━━━━╺━━━━━━━━━━━━━━  loss 0.1234  top1 97.50 %  812 samples/s  ETA 0:12

epoch 3/15  step 120/345  loss 0.1234  top1 97.50 %  812 samples/s  ETA 0:12
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from shoal.errors import UsageError
from shoal.loggers import LoggerGroup, open_logger
from shoal.loggers.metrics_file import NAME, MetricsFile, Record
from shoal.platform.optional_packages import missing
from shoal.platform.terminal import REFRESH_S, line_interval_s, on_terminal, open_live

if TYPE_CHECKING:
    from rich.console import RenderableType

MIN_BAR = 8
MAX_BAR = 40
"""Columns of the bar."""


def print_rank_zero(text: str) -> None:
    """Print to stdout at once. A closed pipe or a full disk is no reason to end training."""
    _print(text, sys.stdout)


def warn(text: str) -> None:
    """Print a note to stderr at once."""
    _print(f"note: {text}", sys.stderr)


def _print(text: str, stream: TextIO) -> None:
    try:
        print(text, file=stream, flush=True)
    except (OSError, ValueError):  # ValueError: the stream was closed
        return


def envelope(verb: str, ok: bool, **content: Any) -> str:
    """Return the answer of a verb of the command line as JSON. Args: content: result or errors."""
    from shoal import __version__

    return json.dumps({"shoal": __version__, "verb": verb, "ok": ok, **content})


def number(name: str, value: float) -> str:
    """Format a value by its name in metrics.jsonl; times are in seconds, accuracies in percent."""
    if name.startswith("top"):
        return f"{value:.2f} %"
    if name == "loss":
        return f"{value:.4f}"
    if name == "time_s":
        return duration(value)
    if name == "samples_per_s":
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def measures(record: Mapping[str, float | int]) -> list[str]:
    """Return the results in a record, such as `["loss 0.1234", "top1 97.50 %"]`."""
    names = [name for name in record if name in ("loss", "perplexity") or name.startswith("top")]
    return [f"{name} {number(name, record[name])}" for name in names]


def duration(seconds: float) -> str:
    """Return `0:07`, `12:34`, `3:04:05` or `2 d 3:04:05`."""
    minutes, seconds = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours}:{minutes:02d}:{seconds:02d}"
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def print_summary(summary: Mapping[str, Any]) -> None:
    """Print the closing table, as aligned text.

    Args:
        summary: rows in their order. `final` and `best` are validation records (loss, top1, top5
            or perplexity, and the step). Numbers are named as in metrics.jsonl (`epochs`, `steps`,
            `time_s`, `samples_per_s`). Anything else is text (`checkpoint`, `curves`). A row that
            is None is left out.
    """
    rows = [_row(name, value) for name, value in summary.items() if value is not None]
    width = max((len(label) for label, _ in rows), default=0)
    print_rank_zero("\n".join(f"{label:<{width}}  {value}" for label, value in rows))


def _row(name: str, value: Any) -> tuple[str, str]:
    if isinstance(value, Mapping):
        notes = [f"step {value['step']}"] if "step" in value else []
        notes += [f"by {'top1' if 'top1' in value else 'loss'}"] if name == "best" else []
        behind = f"  ({', '.join(notes)})" if notes else ""
        return f"{name} validation", "  ".join(measures(value)) + behind
    label = {"time_s": "time", "samples_per_s": "samples/s"}.get(name, name)
    return label, number(name, value) if isinstance(value, (int, float)) else str(value)


class Log(LoggerGroup):
    """The records of one run: "train" of optimizer steps, and "validation" of evaluations.

    A disk that fills up later does not end training. There is one note about it, and complete
    records are left out while there is no room.

    Args:
        directory: the run directory; it is made if it does not exist.
        active: True on the rank that writes and prints; on other ranks every method does nothing.
        tensorboard: write TensorBoard events too, in directory/tensorboard.
        resume_step: records of later steps are removed; 0 for a new run.
        loggers: names of more loggers; see `shoal.loggers`.
        settings: of the run, for these.

    Raises:
        UsageError: the directory cannot be written.
    """

    def __init__(
        self,
        directory: Path,
        *,
        active: bool,
        tensorboard: bool,
        resume_step: int,
        loggers: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(self.note)
        self._active = active
        self._directory = directory
        if not active:
            return
        try:
            self.loggers.append(MetricsFile(directory, resume_step))
        except OSError as error:
            raise UsageError(
                f"{directory / NAME} cannot be written: {error.strerror}. Give another --out."
            ) from error
        if tensorboard and (sentences := missing("tensorboard")):
            self.note(f"no TensorBoard events are written: {sentences[0]}")
            tensorboard = False
        for name in dict.fromkeys([*(["tensorboard"] if tensorboard else []), *loggers]):
            try:
                self.loggers.append(open_logger(name, directory, resume_step, settings or {}))
            except OSError as error:
                self.note_loss(error, name)

    def header(self, lines: Sequence[str]) -> None:
        """Print the lines that describe the run."""
        if self._active:
            print_rank_zero("\n".join(lines))

    def note(self, text: str) -> None:
        """Print a note on stderr."""
        if self._active:
            warn(text)

    def reopen(self) -> None:
        """Write to a new metrics.jsonl from now on: the directory was removed, and made again."""
        for index, file in enumerate(self.loggers):
            if isinstance(file, MetricsFile):
                file.close()
                self.loggers[index] = MetricsFile(self._directory, 0)

    def close(self, summary: Mapping[str, Any] | None = None) -> None:
        """Close the files, and print the closing table. A run that was stopped has no summary."""
        super().close()
        if self._active and summary is not None:
            print_summary(summary)


class Progress:
    """The display of one run. It gets plain numbers, and never waits for the device.

    Call `epoch` when an epoch begins, `step` after each optimizer step, `show` when a record is
    logged, `paused` around all that is not training, `evaluation` with its result, and `close` at
    the end. Call `close` also if the run fails: it restores the terminal.

    Args:
        active: True on the rank that shows anything; on other ranks every method does nothing.
        epochs: epochs of the run.
        total_steps: optimizer steps of the run.
        done_steps: steps of it that an earlier process took.
        clock: monotonic, in seconds.
    """

    def __init__(
        self,
        *,
        active: bool,
        epochs: int,
        total_steps: int,
        done_steps: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._active = active
        self._epochs = epochs
        self._total_steps = total_steps
        self._step = done_steps
        self._epoch = 1
        self._epoch_steps = 1
        self._epoch_step = 0
        self._results: list[str] = []
        self._speed: list[str] = []
        self._doing = ""
        self._clock = clock
        self._start_s = clock()
        self._next_line_s = 0.0
        self._next_redraw_s = 0.0
        # Steps and time at the end of the first step, which compiles and allocates.
        self._measured_from: tuple[int, float] | None = None
        self._live = open_live() if active and on_terminal(sys.stdout) else None

    def epoch(self, epoch: int, steps: int, done: int = 0) -> None:
        """Begin an epoch, counted from 1, after `done` of its `steps`."""
        self._epoch = epoch
        self._epoch_steps = steps
        self._epoch_step = done
        self._redraw()

    def step(self) -> None:
        """Count an optimizer step. Cheap in every step."""
        if not self._active:
            return
        self._step += 1
        self._epoch_step += 1
        now_s = self._clock()
        if self._measured_from is None:
            self._measured_from = self._step, now_s
        if now_s >= self._next_redraw_s:
            self._next_redraw_s = now_s + REFRESH_S
            self._redraw()

    def show(self, record: Record) -> None:
        """Show the newest results of training, next to the bar or as a line.

        Lines are printed at most once a second. In a longer run the interval is 1 % of the time so
        far, and at most a minute.
        """
        if not self._active:
            return
        self._results = measures(record)
        remaining_s = self.remaining_s
        if "samples_per_s" in record and remaining_s is not None:
            speed = number("samples_per_s", record["samples_per_s"])
            self._speed = [f"{speed} samples/s", f"ETA {duration(remaining_s)}"]
        passed_s = self._clock() - self._start_s
        if self._live is None and passed_s >= self._next_line_s:
            self._next_line_s = passed_s + line_interval_s(passed_s)
            print_rank_zero("  ".join([self._position(), *self._results, *self._speed]))

    def evaluation(self, record: Record) -> None:
        """Print the results of an evaluation: a line that stays, on a terminal too."""
        if not self._active:
            return
        line = "  ".join([self._position(), "validation", *measures(record)])
        if self._live is None:
            print_rank_zero(line)
        else:
            with suppress(OSError):
                self._live.console.print(line, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def paused(self, doing: str) -> Iterator[None]:
        """Show `doing` in this context."""
        self._doing = doing
        self._redraw()
        try:
            yield
        finally:
            self._doing = ""

    def close(self) -> None:
        """Remove the bar. May be called twice."""
        if self._live is not None:
            with suppress(OSError):
                self._live.stop()
            self._live = None

    @property
    def remaining_s(self) -> float | None:
        """Seconds to the end of the run, pauses included; None before the second step."""
        if self._measured_from is None or self._step == self._measured_from[0]:
            return None
        step, time_s = self._measured_from
        return (self._total_steps - self._step) * (self._clock() - time_s) / (self._step - step)

    def _position(self) -> str:
        return f"epoch {self._epoch}/{self._epochs}  step {self._step}/{self._total_steps}"

    def _redraw(self) -> None:
        if self._live is not None:
            with suppress(OSError):
                self._live.update(self._bar(self._live.console.width), refresh=True)

    def _bar(self, width: int) -> RenderableType:
        """Return the epoch as a bar with results, speed and end; without it where it is narrow."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        label = f"epoch {self._epoch}/{self._epochs}"
        words = "  ".join([*self._results, *([self._doing] if self._doing else self._speed)])
        spacing = 5  # between label, bar and words, and at the end of the line
        length = min(MAX_BAR, width - len(label) - len(words) - spacing)
        if length < MIN_BAR:
            return Text(f"{label}  {words}", no_wrap=True, overflow="crop")
        grid = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
        bar = ProgressBar(self._epoch_steps, self._epoch_step, width=length)
        grid.add_row(Text(label, style="bold"), bar, Text(words))
        return grid
