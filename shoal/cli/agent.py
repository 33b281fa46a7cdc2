"""`shoal agent`: the part of a run on one of several hosts. Commands with --hosts start it."""

from __future__ import annotations

import argparse

HELP = "run ranks for a command on another host, which starts this one by ssh"
EXAMPLES = """\
  shoal agent                                   waits for its driver on standard input
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: all that an agent needs comes on standard input."""


def run(options: argparse.Namespace) -> int:
    from shoal.launch.hosts.agent_process import run_agent

    run_agent()
