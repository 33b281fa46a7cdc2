"""The output of ranks: rank 0 writes to the launcher's terminal, the others line by line."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Literal, TextIO

StreamName = Literal["stdout", "stderr"]
Output = Literal["first", "all", "lines"]
"""The outputs that the user sees.

- `first`: stdout of rank 0 and stderr of every rank. Rank 0 has the terminal; lines of other ranks
  begin with their rank.
- `all`: the same, with stdout of every rank.
- `lines`: as `all`, but lines of rank 0 begin with their rank too, and no rank has a terminal.
"""

NEWLINE = re.compile(rb"(?<=\n)")
NEWLINE_OR_RETURN = re.compile(rb"(?<=[\r\n])")
"""A progress bar ends each of its states with a carriage return."""

OutputMode = Literal["through", "lines", "dropped"]


def output_mode(output: Output, rank: int, stream: StreamName) -> OutputMode:
    """Return how one stream of one rank reaches the user."""
    if rank == 0 and output != "lines":
        return "through"
    return "dropped" if output == "first" and stream == "stdout" else "lines"


@dataclass(eq=False)
class LineForwarder:
    """Reads what one rank writes to one stream, in complete lines.

    Args:
        source: the end of the pipe from which the lines are read.
        emit: takes complete lines, each with its end.
        ends: matches behind each line.
    """

    source: Connection
    emit: Callable[[list[str]], None]
    ends: re.Pattern[bytes] = NEWLINE
    unfinished: bytes = field(default=b"", init=False)

    def fileno(self) -> int:
        return self.source.fileno()

    def forward(self) -> bool:
        """Take the bytes that have arrived; wait if there are none.

        Returns:
            False once the rank has closed the stream.
        """
        received = os.read(self.fileno(), 1 << 16)
        *lines, self.unfinished = self.ends.split(self.unfinished + received)
        if not received and self.unfinished:  # the last line has no newline
            lines, self.unfinished = [*lines, self.unfinished + b"\n"], b""
        if lines:
            self.emit([line.decode(errors="replace") for line in lines])
        return bool(received)


def print_lines(rank: int, sink: TextIO, lines: list[str]) -> None:
    """Print lines that begin with the rank."""
    sink.write("".join(f"[rank {rank}] {line}" for line in lines))
    sink.flush()


def print_line(text: str) -> None:
    """Print a text of the launcher on a line of its own."""
    # On a terminal a rank that was killed leaves its progress bar, without the end of its line.
    begin = "\n" if sys.stderr.isatty() else ""
    print(f"{begin}{text}", file=sys.stderr, flush=True)


def print_note(text: str) -> None:
    """Print a note of the launcher."""
    print_line(f"note: {text}")
