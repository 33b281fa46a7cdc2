"""`shoal plot`: draw the curves of runs.

Several runs share one picture, so that their losses and speeds can be compared.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from shoal.cli import answers, argument_types

HELP = "draw the curves of one run, or of several in comparison"
EXAMPLES = """\
  shoal plot runs/digits                        into curves.png
  shoal plot runs/ddp runs/zero3 -o both.svg    two runs in comparison
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", type=argument_types.path, metavar="RUN", help="run directory"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=argument_types.path,
        default=Path("curves.png"),
        help=".png or .svg (default: curves.png)",
    )


def run(options: argparse.Namespace) -> int:
    from shoal.plotting.curves import plot
    from shoal.trace.chrome import find_file

    plot(options.runs, options.output)
    answers.show(options, {"file": str(options.output)}, options.output)
    for trace in filter(None, map(find_file, options.runs)):
        print(f"the trace is not drawn: open {trace} in https://ui.perfetto.dev", file=sys.stderr)
    return 0
