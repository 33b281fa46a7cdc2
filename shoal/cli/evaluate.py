"""`shoal eval`: evaluate a run on every validation sample.

It runs on any number of processes, whatever number has trained, and the result is the same.
"""

from __future__ import annotations

import argparse

from shoal.cli import argument_types, execution

HELP = "evaluate a run on every validation sample"
EXAMPLES = """\
  shoal eval runs/digits                        the newest checkpoint
  shoal eval runs/digits -n 4 --checkpoint best --json
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=argument_types.path, help="run directory")
    parser.add_argument(
        "-n",
        "--processes",
        type=argument_types.processes,
        help="processes on this machine (default: 1)",
    )
    parser.add_argument(
        "--checkpoint",
        choices=("latest", "best"),
        default="latest",
        help="which one (default: latest)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object with top1, top5, loss, samples"
    )


def run(options: argparse.Namespace) -> int:
    from shoal.train.run_directory import job_of

    info = execution.rank_info(options.processes)
    job_of(options.run)  # reports a wrong directory before any process starts
    arguments = (options.run, options.checkpoint, options.json)
    return execution.call(info.world, options.processes or info.world, "evaluate_run", arguments)
