"""`shoal trace`: print where the time of traced steps went.

It reads the trace.json of a run with --trace. The JSON goes to stdout alone, so that a program can
parse it.
"""

from __future__ import annotations

import argparse

from shoal.cli import answers, argument_types

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
    answers.json_argument(parser)


def run(options: argparse.Namespace) -> int:
    from shoal.trace import chrome, report
    from shoal.trace.breakdown import compute_breakdown

    trace = chrome.read(options.run)
    breakdown = compute_breakdown(trace.spans)
    text = "\n".join(report.lines(trace, breakdown))
    return answers.show(options, report.to_json(trace, breakdown), text)
