"""The command line, with one module for each verb.

A verb has HELP, EXAMPLES, `arguments`, which adds arguments to its parser, and `run`, which returns
the exit status. It imports torch inside `run`, because that takes seconds and --help does not need
it.
"""

from shoal.cli.program import main

__all__ = ["main"]
