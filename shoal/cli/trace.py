"""`shoal trace`: print where the time of traced steps went.

It reads the trace.json of a run with --trace. The JSON goes to stdout alone, so that a program can
parse it.
"""

from __future__ import annotations

import argparse
from typing import Any

from shoal.cli import answers, argument_types
from shoal.trace import chrome
from shoal.trace.breakdown import COMPONENTS, Breakdown, compute_breakdown

MAX_ROWS = 32
HELP = "say where the time of traced steps went, on each rank"
EXAMPLES = """\
  shoal train digits -n 2 --trace               or: shoal launch -n 2 --trace train.py
  shoal trace runs/digits --json

https://ui.perfetto.dev and chrome://tracing open RUN/trace.json itself
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        type=argument_types.path,
        metavar="RUN",
        help="directory of a run trained with --trace, or a trace file",
    )


def run(options: argparse.Namespace) -> int:
    trace = chrome.read(options.run)
    breakdown = compute_breakdown(trace.spans)
    text = "\n".join(lines(trace, breakdown))
    return answers.show(options, to_json(trace, breakdown), text)


def to_json(trace: chrome.Trace, breakdown: Breakdown) -> dict[str, Any]:
    """Return all figures. Times are in seconds, means over the traced steps."""
    return {
        "file": str(trace.file),
        "steps": list(trace.steps),
        "clock_error_s": trace.clock_error_s,
        "ranks": {
            str(rank): {
                "step_s": share.step_s,
                **{f"{component}_s": time_s for component, time_s in share.parts_s.items()},
                "hidden_s": share.hidden_s,
                "blamed_s": share.blamed_s,
                "sent_bytes": share.sent_bytes,
            }
            for rank, share in breakdown.shares.items()
        },
        "slowest": None if breakdown.slowest is None else breakdown.slowest._asdict(),
    }


def lines(trace: chrome.Trace, breakdown: Breakdown) -> list[str]:
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


def conclusions(trace: chrome.Trace, breakdown: Breakdown) -> list[str]:
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
