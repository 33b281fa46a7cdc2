"""The output of ranks: rank 0 writes to the launcher's terminal, the others line by line.

A terminal that stands still (Ctrl-S, a slow pipe) blocks who writes to it. On several hosts it must
not block the answers to heartbeats, for without them the agents' leases would end.
"""

from __future__ import annotations

import os
import queue
import re
import sys
import threading
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

LINE_END = re.compile(rb"(?<=[\r\n])")
"""A progress bar ends each of its states with a carriage return."""

MOST_WAITING = 10_000
"""Messages of output that wait for the terminal, of at most 8,000 characters; more are dropped."""
PIECES = re.compile(r"(?<=[\r\n])")


@dataclass(eq=False)
class LineForwarder:
    """Reads what one rank writes to one stream, in complete lines.

    Args:
        source: the end of the pipe from which the lines are read.
        emit: takes complete lines, each with its end.
    """

    source: Connection
    emit: Callable[[list[str]], None]
    unfinished: bytes = field(default=b"", init=False)

    def fileno(self) -> int:
        return self.source.fileno()

    def forward(self) -> bool:
        """Take the bytes that have arrived; wait if there are none.

        Returns:
            False once the rank has closed the stream.
        """
        received = os.read(self.fileno(), 1 << 16)
        *lines, self.unfinished = LINE_END.split(self.unfinished + received)
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


class LinePrinter:
    """Prints lines of ranks in a thread of its own.

    Args:
        output: the outputs that the user sees.

    Attributes:
        error: why nothing is printed any more; None while all is well.
        dropped: lines that were not printed, to be told by `flush`.
    """

    def __init__(self, output: Output = "all") -> None:
        self._shows_all = output != "first"
        self.error: OSError | None = None
        self._queue: queue.Queue[tuple[str, str]] = queue.Queue(MOST_WAITING)
        self.dropped = 0
        threading.Thread(target=self._run, name="printer", daemon=True).start()

    def put(self, name: str, rank: int | None, stream: str, text: str) -> None:
        """Print what a rank has written: rank 0 as it is, others in lines that begin with the rank.

        Args:
            name: of the host.
            rank: None for parameter servers.
        """
        pieces = [piece for piece in PIECES.split(text) if piece]
        if stream == "stdout" and rank != 0 and not self._shows_all:
            return
        if rank != 0:
            process = "servers" if rank is None else f"rank {rank}"
            text = "".join(f"[{process} on {name}] {piece}" for piece in pieces)
        try:
            self._queue.put_nowait((stream, text))
        except queue.Full:
            self.dropped += len(pieces)

    def flush(self) -> None:
        """Wait until all has been printed; tell how much was not."""
        self._queue.join()
        if self.dropped and self.error is None:
            self._write("stderr", f"note: {self.dropped} lines of ranks were not printed\n")
        self.dropped = 0

    def _run(self) -> None:
        while True:
            stream, text = self._queue.get()
            try:
                if self.error is None:
                    self._write(stream, text)
            except OSError as error:
                self.error = error
            finally:
                self._queue.task_done()

    def _write(self, stream: str, text: str) -> None:
        sink = sys.stdout if stream == "stdout" else sys.stderr
        # Text of ranks may hold what the terminal's encoding has not.
        encoding = sink.encoding or "utf-8"
        sink.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sink.flush()
