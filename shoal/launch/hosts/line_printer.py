"""The printing of ranks' output and their logs, beside the thread that answers heartbeats.

A terminal that stands still (Ctrl-S, a slow pipe) blocks who writes to it. It must not block the
answers, for without them the agents' leases would end.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import socket
import sys
import threading
from collections import Counter, defaultdict, deque
from pathlib import Path
from typing import NamedTuple

from shoal.errors import UsageError
from shoal.launch.output import Output
from shoal.platform.ownership import open_own

LAST_LINES = 5
PIECES = re.compile(r"(?<=[\r\n])")


class Lines(NamedTuple):
    """Output of a rank: as it was received, and as it is shown."""

    host: int
    rank: int
    stream: str
    received: str
    shown: str


class LinePrinter:
    """Prints lines of ranks in a thread of its own.

    Args:
        output: the outputs that the user sees.
        logs: take all that ranks write; None for no logs.

    Attributes:
        last_lines: the last lines that each rank wrote to stderr.
        error: why nothing is printed any more; None while all is well.
    """

    def __init__(self, output: Output = "all", logs: RankLogs | None = None) -> None:
        self._shows_all = output != "first"
        self._logs = logs
        self.last_lines: defaultdict[int, deque[str]] = defaultdict(
            lambda: deque(maxlen=LAST_LINES)
        )
        self.error: OSError | None = None
        self._queue: queue.Queue[Lines] = queue.Queue()
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
        received = text
        pieces = [piece for piece in PIECES.split(text) if piece]
        if stream == "stderr":
            self.last_lines[rank].extend(piece.rstrip("\r\n") for piece in pieces)
        if rank != 0:
            text = "".join(f"[rank {rank} on {name}] {piece}" for piece in pieces)
        is_shown = rank == 0 or stream == "stderr" or self._shows_all
        self._queue.put(Lines(host, rank, stream, received, text if is_shown else ""))

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
            lines = self._queue.get()
            try:
                if self._logs is not None:
                    self._logs.write(lines.rank, lines.received)
                if self.error is None and lines.shown:
                    self._write(lines.stream, lines.shown)
            except OSError as error:
                self.error = error
            finally:
                with self._lock:
                    self._printed[lines.host] += len(lines.received)
                self._queue.task_done()
                with contextlib.suppress(BlockingIOError):
                    self._waker.send(b".")

    def _write(self, stream: str, text: str) -> None:
        sink = sys.stdout if stream == "stdout" else sys.stderr
        # Text of ranks may hold what the terminal's encoding has not.
        encoding = sink.encoding or "utf-8"
        sink.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sink.flush()


class RankLogs:
    """Appends what each rank prints to `DIRECTORY/rank-N.log`, stdout and stderr as they come.

    The directory may be one that other users can write: nothing is written through a link, into a
    pipe, or into another user's file.

    Args:
        directory: made where it does not exist.

    Raises:
        UsageError: nothing can be written there.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[int, int] = {}
        self._has_failed = False
        try:
            directory.mkdir(parents=True, exist_ok=True)
            os.close(self._open(0))
        except OSError as error:
            raise UsageError(
                f"--log-dir {directory}: no log can be written there: {error.strerror}. "
                "Choose a directory of yours"
            ) from error

    def write(self, rank: int, text: str) -> None:
        """Append text of a rank. After an error, such as a full disk, nothing is written."""
        if self._has_failed:
            return
        try:
            if rank not in self._files:
                self._files[rank] = self._open(rank)
            data = memoryview(text.encode(errors="backslashreplace"))
            while data:
                data = data[os.write(self._files[rank], data) :]
        except OSError as error:
            self._has_failed = True
            print(
                f"note: no more logs are written in {self._directory}: {error.strerror}",
                file=sys.stderr,
                flush=True,
            )

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _open(self, rank: int) -> int:
        path = self._directory / f"rank-{rank}.log"
        return open_own(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
