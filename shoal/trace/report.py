"""What an account says: as a table for people, and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from shoal.trace.breakdown import COMPONENTS, Breakdown
from shoal.trace.chrome import Trace

MOST_ROWS = 32


def to_json(trace: Trace, found: Breakdown) -> dict[str, Any]:
    """All of it. Times in seconds, means over the traced steps."""
    return {
        "file": str(trace.file),
        "steps": list(trace.steps),
        "clock_error_s": trace.clock_error_s,
        "ranks": {str(rank): asdict(shares) for rank, shares in found.shares.items()},
        "slowest": None if found.slowest is None else found.slowest._asdict(),
    }


def lines(trace: Trace, found: Breakdown) -> list[str]:
    """The table, and what follows from it. Args: trace: of one whole step at least, as
    `chrome.read` gives it.
    """
    first, last = trace.steps[0], trace.steps[-1]
    which = f"step {first}" if first == last else f"steps {first} to {last}, mean of {found.steps}"
    said = [f"{trace.file}: {which}, in milliseconds", ""]
    columns = ["rank", "step", *COMPONENTS, "(hidden)", "MiB"]
    rows = []
    for rank, share in found.shares.items():
        times = [share.step_s, *(share.parts_s[part] for part in COMPONENTS), share.hidden_s]
        rows.append(
            [
                str(rank),
                *(f"{1e3 * time:,.2f}" for time in times),
                f"{share.sent_bytes / 2**20:,.2f}",
            ]
        )
    said += _table(columns, rows[:MOST_ROWS])
    if len(rows) > MOST_ROWS:
        said.append(f"... and {len(rows) - MOST_ROWS} more: --json has them all")
    return [*said, "", *_shares(found), *conclusions(trace, found)]


def conclusions(trace: Trace, found: Breakdown) -> list[str]:
    """What follows from it, in sentences."""
    said = []
    slow = found.slowest
    if slow is not None:
        rest = len(found.shares) - 1
        who = "the other one waited" if rest == 1 else f"the other {rest} together waited"
        why = (
            f" It spends {1e3 * slow.more_s:,.2f} ms more in {slow.part}."
            if slow.more_s > 0
            else ""
        )
        said.append(
            f"rank {slow.rank} is the slowest: {who} {1e3 * slow.waited_s:,.2f} ms a step for "
            f"it.{why}"
        )
    elif len(found.shares) > 1:
        said.append("no rank is slower than the others: they wait for none of them for long.")
    if trace.clock_error_s:
        said.append(f"clocks of hosts were aligned to within {1e6 * trace.clock_error_s:,.0f} us.")
    return said


def _shares(found: Breakdown) -> list[str]:
    """Of all ranks together."""
    total = sum(share.step_s for share in found.shares.values())
    parts = {
        part: sum(share.parts_s[part] for share in found.shares.values()) for part in COMPONENTS
    }
    told = [f"{part} {100 * time / max(total, 1e-12):.0f} %" for part, time in parts.items()]
    return [f"all ranks: {', '.join(told)}"]


def _table(columns: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in [columns, *rows]
    ]
