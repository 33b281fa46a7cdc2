"""`shoal verify`: prove that a strategy trains an experiment as one process does."""

from __future__ import annotations

import argparse
import json
import sys
import traceback

from shoal.cli import argument_types, job_options
from shoal.errors import ConfigError, ShoalError, printable

HELP = "prove that a strategy trains a model as one process does, in float64 on the CPU"
EXAMPLES = """\
  shoal verify digits --strategy zero3 -n 2
  shoal verify my.yaml --strategy tensor=2,pipeline=2 -n 4

exit status: 0 exact; 1 differs, by design or not; 2 refused, or no verdict: bad input, a failed
process
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    job_options.arguments(parser, "processes to compare with one (default: 2)")
    parser.add_argument(
        "--steps",
        type=argument_types.integer(1, 1_000_000),
        default=5,
        help="optimizer steps, SGD with momentum (default: 5)",
    )
    parser.add_argument(
        "--tolerance",
        type=argument_types.tolerance,
        default=1e-10,
        help="relative (default: 1e-10)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Verify, and print the verdict.

    Exit status 0: exact; 1: beyond the tolerance; 2: refused, or no verdict. Python itself ends
    with 1 after an exception, so every exception is caught: a failure must not look like a verdict.
    """
    try:
        return _verdict(options)
    except ShoalError as error:
        print(f"shoal: {printable(str(error))}", file=sys.stderr)
    except Exception:  # noqa: BLE001 - see above
        traceback.print_exc()
    return 2


def _verdict(options: argparse.Namespace) -> int:
    options.source = options.source or ["digits"]
    ranks = 2 if options.processes is None else options.processes
    settings, line, notes = job_options.settings(options, ranks)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    from shoal.train import job_precheck
    from shoal.train.job_verification import verify_config

    if problems := job_precheck.problems(settings.job):
        raise ConfigError(problems)

    verdict = verify_config(settings.job, line, ranks, options.steps, options.tolerance)
    print(json.dumps(verdict.to_json()) if options.json else verdict)
    return {"exact": 0, "refused": 2}.get(verdict.verdict, 1)
