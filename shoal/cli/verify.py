"""`shoal verify`: prove that a strategy trains an experiment as one process does."""

from __future__ import annotations

import argparse
import traceback

from shoal.cli import answers, argument_types, job_options
from shoal.errors import ShoalError, UsageError, headline_of, raise_problems

HELP = "prove that a strategy trains as one process does, in float64"
EXAMPLES = """\
  shoal verify digits --strategy zero3 -n 2
  shoal verify my.yaml --strategy tensor=2,pipeline=2 -n 4
  shoal verify train.py --strategy zero3 -n 2      your own script, unchanged
  shoal verify ddp.py -n 2 -- --epochs 1           without Shoal too; its own words after --

exit status: 0 exact; 1 differs, by design or not; 2 refused, or no verdict: bad input, a failed
process
"""
STEPS, SCRIPT_STEPS = 5, 3


def arguments(parser: argparse.ArgumentParser) -> None:
    job_options.arguments(parser, "processes to compare with one (default: 2)")
    parser.add_argument(
        "--steps",
        type=argument_types.integer(1, 1_000_000),
        help=f"optimizer steps (default: {STEPS}, of a script {SCRIPT_STEPS}); SGD with momentum, "
        "in a script its own",
    )
    parser.add_argument(
        "--tolerance",
        type=argument_types.tolerance,
        default=1e-10,
        help="relative error that is still rounding (default: 1e-10)",
    )
    script = parser.add_argument_group("a script", "Python file in place of NAME_OR_YAML")
    sentence = "scripts are compared in float64, where rounding hides nothing. Leave it out"
    argument_types.answer_option(script, "--precision", sentence=sentence)
    script.add_argument(
        "--keep", type=argument_types.path, metavar="DIR", help="keep the records of both runs"
    )


def run(options: argparse.Namespace) -> int:
    """Verify, and print the verdict.

    Exit status 0: exact; 1: beyond the tolerance; 2: refused, or no verdict. Python itself ends
    with 1 after an exception, so every exception is caught: a failure must not look like a verdict.
    """
    try:
        is_script = len(options.source) == 1 and options.source[0].endswith(".py")
        return _script_verdict(options) if is_script else _verdict(options)
    except ShoalError as error:
        answers.show_error("verify", options.json, error)
    except Exception as error:  # noqa: BLE001 - see above
        traceback.print_exc()
        if options.json:
            answers.show_error("verify", True, headline_of(error))
    return 2


def _verdict(options: argparse.Namespace) -> int:
    for name in ("keep", "script_arguments"):
        if getattr(options, name):
            word = "words after --" if name == "script_arguments" else f"--{name}"
            raise UsageError(f"{word}: only for a script, as in `shoal verify train.py`.")
    options.source = options.source or ["digits"]
    ranks = 2 if options.processes is None else options.processes
    settings, line = job_options.settings(options, ranks)
    from shoal.train import job_precheck
    from shoal.train.evaluation import verify_config

    raise_problems(job_precheck.problems(settings.job))

    steps = STEPS if options.steps is None else options.steps
    answers.tell_start(f"training {steps} steps on one process and on {ranks}")
    verdict = verify_config(settings.job, line, ranks, steps, options.tolerance)
    status = {"exact": 0, "refused": 2}.get(verdict.verdict, 1)
    return answers.show(options, verdict.to_json(), verdict, status)


def _script_verdict(options: argparse.Namespace) -> int:
    strategy = job_options.script_strategy(options)
    from shoal.verification.script.script_verdict import verify_script

    ranks = 2 if options.processes is None else options.processes
    answers.tell_start(f"running {options.source[0]} on one process and on {ranks}")
    report = verify_script(
        options.source[0],
        options.script_arguments,
        ranks=ranks,
        strategy=strategy,
        steps=SCRIPT_STEPS if options.steps is None else options.steps,
        tolerance=options.tolerance,
        keep=options.keep,
    )
    return answers.show(options, report.to_json(), report, report.exit_code)
