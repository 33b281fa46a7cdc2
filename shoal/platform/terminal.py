"""Text on a terminal that is replaced by later text, such as a bar."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.live import Live

REFRESH_S = 0.25


def on_terminal(stream: TextIO) -> bool:
    """Return True if text on this stream can be replaced later.

    It cannot in a Slurm log, a pipe or a dumb terminal.
    """
    if not stream.isatty():
        return False
    from rich.console import Console

    return not Console(file=stream).is_dumb_terminal


def open_live() -> Live:
    """Return a display on stdout that its `update(..., refresh=True)` draws anew; stop it."""
    from rich.console import Console
    from rich.live import Live

    # Without a thread of its own: that could hold locks while data-loader workers are forked.
    live = Live(
        console=Console(), auto_refresh=False, transient=True, redirect_stderr=sys.stderr.isatty()
    )
    live.start()
    # A process that is killed could not bring a hidden cursor back.
    live.console.show_cursor(True)
    return live


def line_interval_s(passed_s: float) -> float:
    """Return the seconds between lines where nothing is replaced: 1 % of the time so far."""
    return min(60.0, max(1.0, passed_s / 100))
