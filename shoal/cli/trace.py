"""`shoal trace`: print where the time of traced steps went, and draw it.

It reads the trace.json of a run with --trace. The JSON goes to stdout alone, so that a program can
parse it.
"""

from __future__ import annotations

import argparse
import json

from shoal.cli import argument_types

HELP = (
    "say where the time of traced steps went: compute, communication, waiting for the slowest, data"
)
EXAMPLES = """\
  shoal train digits -n 2 --trace               or: shoal launch -n 2 --trace train.py
  shoal trace runs/digits -o trace.png

https://ui.perfetto.dev and chrome://tracing open RUN/trace.json itself
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        type=argument_types.path,
        metavar="RUN",
        help="directory of a run trained with --trace, or a trace file",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "-o", "--output", type=argument_types.path, help="draw it into this .png or .svg"
    )


def run(options: argparse.Namespace) -> int:
    from shoal.plotting.curves import refuse_suffix
    from shoal.trace import chrome, report
    from shoal.trace.breakdown import compute_breakdown

    if options.output is not None:
        refuse_suffix(options.output)  # before the trace is read, which may take a minute
    trace = chrome.read(options.run)
    breakdown = compute_breakdown(trace.spans)
    if options.json:
        print(json.dumps(report.to_json(trace, breakdown)))
    else:
        print("\n".join(report.lines(trace, breakdown)))
    if options.output is not None:
        from shoal.plotting.trace_plot import save

        save(trace, breakdown, options.output)
        if not options.json:
            print(options.output)
    return 0
