"""The printing of ranks' output, beside the thread that answers heartbeats.

A terminal that stands still (Ctrl-S, a slow pipe) blocks who writes to it. It must not block the
answers, for without them the agents' leases would end.
"""

from __future__ import annotations

import contextlib
import queue
import re
import socket
import sys
import threading
from collections import Counter, defaultdict, deque

LAST_LINES = 5
PIECES = re.compile(r"(?<=[\r\n])")


class LinePrinter:
    """Prints lines of ranks in a thread of its own.

    Attributes:
        last_lines: the last lines that each rank wrote to stderr.
        error: why nothing is printed any more; None while all is well.
    """

    def __init__(self) -> None:
        self.last_lines: defaultdict[int, deque[str]] = defaultdict(
            lambda: deque(maxlen=LAST_LINES)
        )
        self.error: OSError | None = None
        self._queue: queue.Queue[tuple[int, str, str]] = queue.Queue()
        self._printed: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        threading.Thread(target=self._run, name="printer", daemon=True).start()

    def fileno(self) -> int:
        """Return a descriptor that can be read once something has been printed."""
        return self._woken.fileno()

    def put(self, host: int, name: str, rank: int, stream: str, text: str) -> None:
        """Print what a rank has written: rank 0 as it is, others in lines that begin with the rank.

        Args:
            host: the number of the host, for `printed`.
            name: of the host.
        """
        pieces = [piece for piece in PIECES.split(text) if piece]
        if stream == "stderr":
            self.last_lines[rank].extend(piece.rstrip("\r\n") for piece in pieces)
        if rank != 0:
            text = "".join(f"[rank {rank} on {name}] {piece}" for piece in pieces)
        self._queue.put((host, stream, text))
        with self._lock:
            self._printed[host] -= len(text) - sum(map(len, pieces))  # what was added costs nothing

    def printed(self) -> dict[int, int]:
        """Return how many characters of each host were printed since the last call."""
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        with self._lock:
            printed = {host: count for host, count in self._printed.items() if count > 0}
            for host in printed:
                del self._printed[host]
        return printed

    def flush(self) -> None:
        """Wait until all has been printed."""
        self._queue.join()

    def _run(self) -> None:
        while True:
            host, stream, text = self._queue.get()
            try:
                if self.error is None:
                    self._write(stream, text)
            except OSError as error:
                self.error = error
            finally:
                with self._lock:
                    self._printed[host] += len(text)
                self._queue.task_done()
                with contextlib.suppress(BlockingIOError):
                    self._waker.send(b".")

    def _write(self, stream: str, text: str) -> None:
        sink = sys.stdout if stream == "stdout" else sys.stderr
        # Text of ranks may hold what the terminal's encoding has not.
        encoding = sink.encoding or "utf-8"
        sink.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sink.flush()
