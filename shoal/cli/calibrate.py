"""`shoal calibrate`: measure this machine for `shoal plan`."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from errno import EISDIR
from pathlib import Path
from tempfile import TemporaryFile

from shoal.cli import answers, argument_types
from shoal.errors import UsageError

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
    from shoal.costs.machine import default_path
    from shoal.planner.calibration import calibrate, summary

    path = Path(options.output) if options.output is not None else default_path()
    _check_output(path)
    answers.tell_start("measuring this machine for a minute or two")
    machine = calibrate()
    machine.save(path)
    result = {"file": str(path), **asdict(machine)}
    return answers.show(options, result, f"{summary(machine)}\n{path}")


def _check_output(path: Path) -> None:
    """Raise UsageError where the file could not be written, which measuring would tell too late."""
    try:
        if path.is_dir():
            raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UsageError(f"-o {path}: cannot be written: {error.strerror}") from error
