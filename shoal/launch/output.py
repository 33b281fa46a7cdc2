"""What ranks print: one of them speaks through the launcher's own terminal, the others line by
line, or not at all.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Literal, TextIO

Output = Literal["first", "all", "lines"]
"""Whose output is seen. `first`: stdout of rank 0; `all`: of every rank; stderr of every rank in
both. Rank 0 owns the terminal, the others' lines carry their rank. `lines`: as `all`, but for rank
0 too, and without a terminal."""

OutputMode = Literal["through", "lines", "dropped"]


def output_mode(output: Output, rank: int, stream: Literal["stdout", "stderr"]) -> OutputMode:
    """How one stream of one rank reaches the user."""
    if rank == 0 and output != "lines":
        return "through"
    return "dropped" if output == "first" and stream == "stdout" else "lines"


@dataclass(eq=False)
class LineForwarder:
    """The bytes that one rank writes to one stream, handed on as whole lines with the rank in
    front.
    """

    source: Connection
    rank: int
    sink: TextIO
    unfinished: bytes = field(default=b"", init=False)

    def fileno(self) -> int:
        return self.source.fileno()

    def forward(self) -> bool:
        """Hand on what has arrived, and wait if nothing has; False where the rank has closed
        the stream.
        """
        received = os.read(self.fileno(), 1 << 16)
        *lines, self.unfinished = (self.unfinished + received).split(b"\n")
        if not received and self.unfinished:
            lines, self.unfinished = [self.unfinished], b""
        text = "".join(f"[rank {self.rank}] {line.decode(errors='replace')}\n" for line in lines)
        if text:
            self.sink.write(text)
            self.sink.flush()
        return bool(received)
