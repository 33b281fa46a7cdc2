"""`shoal config`: print the settings of an experiment.

The YAML on stdout is a file that `shoal train` accepts, so notes go to stderr.
"""

from __future__ import annotations

import argparse

from shoal.cli import answers, job_options

HELP = "print an experiment's settings"
EXAMPLES = """\
  shoal config digits                           every setting as YAML, to begin a file of your own
  shoal config my.yaml --explain                with the meaning and the origin of every value
  shoal config my.yaml --optimizer.lr 0.1       what a command line makes of it
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    job_options.arguments(parser, shown=("strategy", "out"))
    parser.add_argument(
        "--explain", action="store_true", help="with the meaning and the origin of every value"
    )


def run(options: argparse.Namespace) -> int:
    from shoal import config

    settings, _ = job_options.settings(options, options.processes or 1)
    text = config.explain(settings) if options.explain else config.to_yaml(settings.job)
    return answers.show(options, config.leaf_settings(settings.job), text)
