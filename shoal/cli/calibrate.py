"""`shoal calibrate`: measure this machine for `shoal plan`."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from shoal.cli import answers, argument_types

HELP = "measure how fast this machine computes and communicates, for shoal plan; a minute or two"
EXAMPLES = """\
  shoal calibrate                    kept in the user's cache, where shoal plan finds it
  shoal calibrate -o machine.json    in a file, for shoal plan --machine machine.json
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", type=argument_types.path, help="file (default: in the user's cache)"
    )


def run(options: argparse.Namespace) -> int:
    from pathlib import Path

    from shoal.costs.machine import default_path
    from shoal.planner.calibration import calibrate, summary

    answers.tell_start("measuring this machine for up to a minute")
    machine = calibrate()
    path = Path(options.output) if options.output is not None else default_path()
    machine.save(path)
    result = {"file": str(path), **asdict(machine)}
    return answers.show(options, result, f"{summary(machine)}\n{path}")
