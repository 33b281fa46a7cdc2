"""What a run looks like while it goes: a bar on a terminal, plain lines elsewhere; on rank 0 alone.

epoch 3/15 ━━━━━━━━━━╺━━━━━━━━━━━━━━  loss 0.1234  top1 97.50 %  812 samples/s  ETA 0:12

epoch 3/15  step 120/345  loss 0.1234  top1 97.50 %  812 samples/s  ETA 0:12
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from shoal.train.console import duration, measures, number, on_terminal, print_rank_zero
from shoal.train.throughput import Throughput

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

Record = Mapping[str, float | int]
SHORTEST_BAR, LONGEST_BAR = 8, 40


class Progress:
    """The display of one run. It sees plain numbers only, and only when the caller has them anyway.

    The caller says what happens: `epoch` at its start, `step` after each optimizer step, `show`
    when a record is logged, `paused` around whatever is not training, `evaluation` with its result,
    and `close` at the end, also when
    the run fails: the terminal is given back there.

    Args:
        active: whether this rank shows anything; on the others every method does nothing.
        epochs: of the whole run.
        total_steps: optimizer steps of the whole run.
        done_steps: those that an earlier process did.
    """

    def __init__(self, *, active: bool, epochs: int, total_steps: int, done_steps: int = 0) -> None:
        self._active = active
        self._epochs, self._total_steps = epochs, total_steps
        self._step = done_steps
        self._epoch, self._epoch_steps, self._epoch_step = 1, 1, 0
        self._results: list[str] = []
        self._doing = ""
        self._line_due_s = 0.0
        self._pace = Throughput(total_steps, done_steps)
        self._live = _open_live() if active and on_terminal(sys.stdout) else None

    def epoch(self, epoch: int, steps: int, done: int = 0) -> None:
        """An epoch (from 1) begins, or goes on after `done` of its `steps`."""
        self._epoch, self._epoch_steps, self._epoch_step = epoch, steps, done
        self._redraw()

    def step(self, samples: int) -> None:
        """An optimizer step on so many samples (over all ranks) is done. May be called at every
        step.
        """
        if not self._active:
            return
        self._step += 1
        self._epoch_step += 1
        if self._pace.step(samples):
            self._redraw()

    def show(self, record: Record) -> None:
        """The newest results of training. On a terminal they join the bar; elsewhere they are a
        line.

        Lines come at most once a second, and as the run gets longer once in 1 % of its time, to one
        a minute."""
        if not self._active:
            return
        self._results = measures(record)
        passed_s = self._pace.passed_s
        if self._live is None and passed_s >= self._line_due_s:
            self._line_due_s = passed_s + min(60.0, max(1.0, passed_s / 100))
            print_rank_zero("  ".join([self._where(), *self._results, *self._speed()]))

    def evaluation(self, record: Record) -> None:
        """The results of an evaluation: a line that stays, on a terminal too."""
        if not self._active:
            return
        line = "  ".join([self._where(), "validation", *measures(record)])
        if self._live is None:
            print_rank_zero(line)
        else:
            with suppress(OSError):
                self._live.console.print(line, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def paused(self, doing: str) -> Iterator[None]:
        """Around an evaluation or a save (`doing` says which), so that it does not count as
        slow training.
        """
        self._doing = doing
        with self._pace.paused():
            self._redraw()
            try:
                yield
            finally:
                self._doing = ""

    def close(self) -> None:
        """Takes the bar away. May be called twice."""
        if self._live is not None:
            with suppress(OSError):
                self._live.stop()
            self._live = None

    def _where(self) -> str:
        return f"epoch {self._epoch}/{self._epochs}  step {self._step}/{self._total_steps}"

    def _speed(self) -> list[str]:
        rate, remaining_s = self._pace.samples_per_s, self._pace.remaining_s
        if rate is None or remaining_s is None:
            return []
        return [f"{number('samples_per_s', rate)} samples/s", f"ETA {duration(remaining_s)}"]

    def _redraw(self) -> None:
        if self._live is not None:
            with suppress(OSError):
                self._live.update(self._bar(self._live.console.width), refresh=True)

    def _bar(self, width: int) -> RenderableType:
        """The epoch as a bar, with as many words at its sides as the terminal is wide enough
        for.
        """
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        left, doing = f"epoch {self._epoch}/{self._epochs}", [self._doing] if self._doing else []
        speed = self._speed()
        words = [*self._results, *doing, *speed]
        given_up_first = [*speed[:1], *reversed(self._results[1:]), *doing]
        while given_up_first and self._room(width, left, words) < SHORTEST_BAR:
            words.remove(given_up_first.pop(0))
        length = self._room(width, left, words)
        if length < SHORTEST_BAR:
            return Text("  ".join([left, *words]), no_wrap=True, overflow="crop")
        grid = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
        bar = ProgressBar(self._epoch_steps, self._epoch_step, width=length)
        grid.add_row(Text(left, style="bold"), bar, Text("  ".join(words)))
        return grid

    def _room(self, width: int, left: str, words: list[str]) -> int:
        """Columns that are left for the bar between these words, at most LONGEST_BAR."""
        return max(0, min(LONGEST_BAR, width - len(left) - len("  ".join(words)) - 5))


def _open_live() -> Live:
    from rich.console import Console
    from rich.live import Live

    # Drawn when the loop says so: a thread that draws would hold locks while data-loader workers
    # are forked.
    live = Live(
        console=Console(), auto_refresh=False, transient=True, redirect_stderr=sys.stderr.isatty()
    )
    live.start()
    # A process that is killed could not bring a hidden cursor back.
    live.console.show_cursor(True)
    return live
