"""Output on the terminal: notes, numbers as people read them, and the closing table."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TextIO


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


def on_terminal(stream: TextIO) -> bool:
    """Return True if text on this stream can be replaced later.

    It cannot in a Slurm log, a pipe or a dumb terminal.
    """
    if not stream.isatty():
        return False
    from rich.console import Console

    return not Console(file=stream).is_dumb_terminal


def _row(name: str, value: Any) -> tuple[str, str]:
    if isinstance(value, Mapping):
        step = f"  (step {value['step']})" if "step" in value else ""
        return f"{name} validation", "  ".join(measures(value)) + step
    label = {"time_s": "time", "samples_per_s": "samples/s"}.get(name, name)
    return label, number(name, value) if isinstance(value, (int, float)) else str(value)
