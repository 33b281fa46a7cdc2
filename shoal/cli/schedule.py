"""`shoal schedule`: draw the schedule of a pipeline.

The drawing needs only the table of the schedule, so nothing is trained and torch is not imported.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from shoal.cli import answers, argument_types

HELP = "draw what each rank of a pipeline computes when"
EXAMPLES = """\
  shoal schedule 1f1b -p 4 -m 8
  shoal schedule zero-bubble -p 4 -m 8
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="naive, gpipe, 1f1b, interleaved, zero-bubble or zbv")
    parser.add_argument(
        "-p",
        "--ranks",
        type=argument_types.integer(1, 1024),
        default=4,
        help="ranks of the pipeline (default: 4)",
    )
    parser.add_argument(
        "-m",
        "--microbatches",
        type=argument_types.integer(1, 4096),
        help="micro-batches of a batch (default: 8; naive: 1)",
    )
    parser.add_argument(
        "-v",
        "--stages",
        type=argument_types.integer(1, 64),
        default=0,
        help="stages on each rank, for interleaved and zero-bubble",
    )


def run(options: argparse.Namespace) -> int:
    from shoal.strategies.pipeline.schedule_timing import legend
    from shoal.strategies.pipeline.schedules import table

    # The naive schedule sends the full batch through the stages, one after the other.
    microbatches = options.microbatches or (1 if options.name == "naive" else 8)
    drawn = table(options.name, options.ranks, microbatches, options.stages)
    return answers.show(options, asdict(drawn), legend(drawn))
