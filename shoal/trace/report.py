"""The breakdown of a trace as a table for people, and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from shoal.trace.breakdown import COMPONENTS, Breakdown
from shoal.trace.chrome import Trace

MAX_ROWS = 32


def to_json(trace: Trace, breakdown: Breakdown) -> dict[str, Any]:
    """Return all figures. Times are in seconds, means over the traced steps."""
    return {
        "file": str(trace.file),
        "steps": list(trace.steps),
        "clock_error_s": trace.clock_error_s,
        "ranks": {str(rank): asdict(shares) for rank, shares in breakdown.shares.items()},
        "slowest": None if breakdown.slowest is None else breakdown.slowest._asdict(),
    }


def lines(trace: Trace, breakdown: Breakdown) -> list[str]:
    """Return the lines of the table, and the conclusions from it.

    Args: trace: of at least one complete step, as `chrome.read` returns it.
    """
    first = trace.steps[0]
    last = trace.steps[-1]
    steps = f"step {first}"
    if first != last:
        steps = f"steps {first} to {last}, mean of {breakdown.steps}"
    rows = []
    for rank, share in breakdown.shares.items():
        parts_s = [share.parts_s[component] for component in COMPONENTS]
        times_s = [share.step_s, *parts_s, share.hidden_s]
        times = [f"{1e3 * time_s:,.2f}" for time_s in times_s]
        rows.append([str(rank), *times, f"{share.sent_bytes / 2**20:,.2f}"])
    columns = ["rank", "step", *COMPONENTS, "(hidden)", "MiB"]
    result = [f"{trace.file}: {steps}, in milliseconds", "", *_table(columns, rows[:MAX_ROWS])]
    if len(rows) > MAX_ROWS:
        result.append(f"... and {len(rows) - MAX_ROWS} more: --json has them all")
    return [*result, "", _total_shares(breakdown), *conclusions(trace, breakdown)]


def conclusions(trace: Trace, breakdown: Breakdown) -> list[str]:
    """Return sentences: the slowest rank, and the error of the clocks."""
    result = []
    slowest = breakdown.slowest
    if slowest is not None:
        others = len(breakdown.shares) - 1
        waited = "the other one waited" if others == 1 else f"the other {others} together waited"
        reason = ""
        if slowest.more_s > 0:
            reason = f" It spends {1e3 * slowest.more_s:,.2f} ms more in {slowest.part}."
        result.append(
            f"rank {slowest.rank} is the slowest: {waited} {1e3 * slowest.waited_s:,.2f} ms a step "
            f"for it.{reason}"
        )
    elif len(breakdown.shares) > 1:
        result.append("no rank is slower than the others: they wait for none of them for long.")
    if trace.clock_error_s:
        error_us = 1e6 * trace.clock_error_s
        result.append(f"clocks of hosts were aligned to within {error_us:,.0f} us.")
    return result


def _total_shares(breakdown: Breakdown) -> str:
    """Return each component's share of the time of all ranks."""
    ranks = breakdown.shares.values()
    total_s = max(sum(share.step_s for share in ranks), 1e-12)
    shares = []
    for component in COMPONENTS:
        time_s = sum(share.parts_s[component] for share in ranks)
        shares.append(f"{component} {100 * time_s / total_s:.0f} %")
    return f"all ranks: {', '.join(shares)}"


def _table(columns: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in [columns, *rows]
    ]
