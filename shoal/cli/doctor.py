"""`shoal doctor`: report what this machine can do, and what is missing.

The exit status is that of the report, so that a script can use it without reading the text.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from shoal.cli import answers

HELP = "look at this machine: what it has, and what is missing"
EXAMPLES = """\
  shoal doctor
  shoal doctor --json                           all facts, for a bug report or a script
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing."""


def run(options: argparse.Namespace) -> int:
    from shoal.doctor import diagnosis

    report = diagnosis.examine()
    return answers.show(options, asdict(report), diagnosis.render(report), report.exit_code)
