"""The printing of ranks' output, beside the thread that answers heartbeats.

A terminal that stands still (Ctrl-S, a slow pipe) blocks who writes to it. It must not block the
answers, for without them the agents' leases would end.
"""

from __future__ import annotations

import queue
import re
import sys
import threading

from shoal.launch.output import Output

MOST_WAITING = 10_000
"""Messages of output that wait for the terminal, of at most 8,000 characters; more are dropped."""
PIECES = re.compile(r"(?<=[\r\n])")


class LinePrinter:
    """Prints lines of ranks in a thread of its own.

    Args:
        output: the outputs that the user sees.

    Attributes:
        error: why nothing is printed any more; None while all is well.
    """

    def __init__(self, output: Output = "all") -> None:
        self._shows_all = output != "first"
        self.error: OSError | None = None
        self._queue: queue.Queue[tuple[str, str]] = queue.Queue(MOST_WAITING)
        self._dropped = 0
        threading.Thread(target=self._run, name="printer", daemon=True).start()

    def put(self, name: str, rank: int, stream: str, text: str) -> None:
        """Print what a rank has written: rank 0 as it is, others in lines that begin with the rank.

        Args: name: of the host.
        """
        pieces = [piece for piece in PIECES.split(text) if piece]
        if stream == "stdout" and rank != 0 and not self._shows_all:
            return
        if rank != 0:
            text = "".join(f"[rank {rank} on {name}] {piece}" for piece in pieces)
        try:
            self._queue.put_nowait((stream, text))
        except queue.Full:
            self._dropped += len(pieces)

    def note_dropped(self, lines: int) -> None:
        """Note that a host has dropped lines, to be told by `flush`."""
        self._dropped += lines

    def flush(self) -> None:
        """Wait until all has been printed; tell how much was not."""
        self._queue.join()
        if self._dropped and self.error is None:
            self._write("stderr", f"note: {self._dropped} lines of ranks were not printed\n")
        self._dropped = 0

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
