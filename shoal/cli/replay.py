"""`shoal replay`: repeat an asynchronous run, bit for bit."""

from __future__ import annotations

import argparse

from shoal.cli import answers, argument_types

HELP = "repeat a run of stale parameter servers, bit for bit"
EXAMPLES = """\
  shoal train digits -n 2 --strategy server=2,staleness=async --record
  shoal replay runs/digits                      take the same steps again, and compare all bits
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", type=argument_types.path, help="run directory, trained with --record"
    )
    parser.add_argument(
        "--checkpoint",
        "--step",
        dest="step",
        type=argument_types.integer(0),
        metavar="N",
        help="go as far as the checkpoint of step N, not the newest",
    )


def run(options: argparse.Namespace) -> int:
    """Replay and print the comparison. Exit status 0: all bits are the same; 1: some differ."""
    from shoal.train.run_directory import job_of

    job_of(options.run)  # reports a wrong directory before torch is imported
    from shoal.train.async_replay import replay

    result = replay(options.run, options.step)
    return answers.show(options, result.to_json(), result, 1 if result.differing else 0)
