"""The lines of a run in Python's logging: `logging.getLogger("shoal")`.

Notes are warnings, all other lines are information. Until a script gives the logger a handler or a
level of its own, every line is printed to stdout.
"""

from __future__ import annotations

import logging

LOGGER = logging.getLogger("shoal")


class Stdout(logging.Handler):
    """Prints each line to what is `sys.stdout` at that time."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record))


def log_line(line: str) -> None:
    """Log a line of the startup summary, or a note."""
    if not LOGGER.handlers:
        LOGGER.addHandler(Stdout())
        LOGGER.propagate = False
        if LOGGER.level == logging.NOTSET:
            LOGGER.setLevel(logging.INFO)
    LOGGER.log(logging.WARNING if line.startswith("note: ") else logging.INFO, line)
