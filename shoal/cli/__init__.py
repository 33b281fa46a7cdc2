"""The command line. A verb is a file: HELP, EXAMPLES, `arguments` for its parser, and `run`, which
gives the exit status.

torch is imported inside `run`, so that --help answers at once.
"""

from shoal.cli.program import main

__all__ = ["main"]
