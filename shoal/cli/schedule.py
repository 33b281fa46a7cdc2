"""`shoal schedule`: draw the schedule of a pipeline.

The drawing needs only the table of the schedule, so nothing is trained and torch is not imported.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from shoal.cli import answers, argument_types
from shoal.errors import UsageError

HELP = "draw the schedule of a pipeline: what each rank computes when"
EXAMPLES = """\
  shoal schedule 1f1b -p 4 -m 8
  shoal schedule pipeline=4,schedule=zbv        of a strategy
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        metavar="NAME_OR_LINE",
        help="naive, gpipe, 1f1b, interleaved, zero-bubble or zbv; or a strategy, pipeline=4,...",
    )
    parser.add_argument(
        "-p",
        "--ranks",
        type=argument_types.integer(1, 1024),
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
        help="stages on each rank, for interleaved and zero-bubble",
    )


def run(options: argparse.Namespace) -> int:
    from shoal.strategies.pipeline.schedule_timing import legend
    from shoal.strategies.pipeline.schedules import table

    if "=" in options.name:
        _read_line(options)
    # The naive schedule sends the full batch through the stages, one after the other.
    microbatches = options.microbatches or (1 if options.name == "naive" else 8)
    drawn = table(options.name, options.ranks or 4, microbatches, options.stages or 0)
    return answers.show(options, asdict(drawn), legend(drawn))


def _read_line(options: argparse.Namespace) -> None:
    """Take what a strategy says of its pipeline into the options.

    Raises:
        ConfigError: there is no such strategy.
        UsageError: it has no pipeline, or an option says otherwise.
    """
    from shoal.strategies import parse_line
    from shoal.strategies.options import PipelineOptions

    line = parse_line(options.name)
    found = [spec.options for spec in line.specs if isinstance(spec.options, PipelineOptions)]
    if not found:
        raise UsageError(f"strategy {line} has no pipeline. Add it: {line},pipeline=4")
    options.name = found[0].schedule
    for name in ("ranks", "microbatches", "stages"):
        said, given = getattr(found[0], name), getattr(options, name)
        if said and given not in (None, said):
            raise UsageError(
                f"--{name} {given}: strategy {line} says {said}. Leave one of them out"
            )
        setattr(options, name, said or given)
