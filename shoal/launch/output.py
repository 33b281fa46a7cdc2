"""The output of ranks: rank 0 writes to the launcher's terminal, the others line by line."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Literal, TextIO

Output = Literal["first", "all", "lines"]
"""The outputs that the user sees.

- `first`: stdout of rank 0 and stderr of every rank. Rank 0 has the terminal; lines of other ranks
  begin with their rank.
- `all`: the same, with stdout of every rank.
- `lines`: as `all`, but lines of rank 0 begin with their rank too, and no rank has a terminal.
"""

OutputMode = Literal["through", "lines", "dropped"]


def output_mode(output: Output, rank: int, stream: Literal["stdout", "stderr"]) -> OutputMode:
    """Return how one stream of one rank reaches the user."""
    if rank == 0 and output != "lines":
        return "through"
    return "dropped" if output == "first" and stream == "stdout" else "lines"


@dataclass(eq=False)
class LineForwarder:
    """Copies what one rank writes to one stream, in complete lines that begin with the rank."""

    source: Connection
    rank: int
    sink: TextIO
    unfinished: bytes = field(default=b"", init=False)

    def fileno(self) -> int:
        return self.source.fileno()

    def forward(self) -> bool:
        """Copy the bytes that have arrived; wait if there are none.

        Returns:
            False once the rank has closed the stream.
        """
        received = os.read(self.fileno(), 1 << 16)
        *lines, self.unfinished = (self.unfinished + received).split(b"\n")
        if not received and self.unfinished:  # the last line has no newline
            lines, self.unfinished = [self.unfinished], b""
        text = "".join(f"[rank {self.rank}] {line.decode(errors='replace')}\n" for line in lines)
        if text:
            self.sink.write(text)
            self.sink.flush()
        return bool(received)
