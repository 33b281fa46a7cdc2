"""`shoal replay`: an asynchronous run once more, bit for bit."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

HELP = "do a recorded run of parameter servers again in one process, and compare bit for bit"
EXAMPLES = """\
  shoal train digits -n 2 --strategy server=2,staleness=async --record
  shoal replay runs/digits                      take the same steps again, and compare all bits
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="run directory, trained with --record")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        help="write the model as it is in the end to a .safetensors file",
    )
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="go as far as the checkpoint of step N, not the newest",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Exit status: 0 the same bits, 1 others."""
    from shoal.train.run_directory import job_of

    job_of(options.run)  # a wrong directory is said at once
    from shoal.train.async_replay import replay

    found = replay(options.run, options.output, options.step)
    print(json.dumps(found.to_json()) if options.json else found)
    return 1 if found.differing else 0
