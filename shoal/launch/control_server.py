"""How a command talks to the launcher of a run that is going: a Unix socket in the run's directory,
JSON in lines.

    shoal scale RUN 6 ── {"scale": 6} ──────────────────────────> RUN/.control ── launcher
                      <── {"stopping": 4}, {"step": 47}, or {"refused": "why"} ──

The socket has mode 0600, so that only who started the run can use it, and it is there as long as
its launcher is. What comes from it is read as JSON, a line of at most `LONGEST_LINE_BYTES`, and no
more than one from each caller."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAME = ".control"
LONGEST_LINE_BYTES = 4096
MOST_CALLERS = 16
LONGEST_NAME_BYTES = 103  # of a socket, on macOS; Linux has room for 107


@contextmanager
def short_name(path: Path) -> Iterator[str]:
    """A name for the socket `path` that is short enough to bind and to connect to. Raises
    OSError without one.
    """
    names = [
        name
        for name in (str(path), os.path.relpath(path))
        if len(os.fsencode(name)) <= LONGEST_NAME_BYTES
    ]
    if names:
        yield names[0]
        return
    if sys.platform != "linux":
        raise OSError(
            f"its path has more than {LONGEST_NAME_BYTES} bytes, the longest that a socket's may "
            "have"
        )
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


class ControlConnection:
    """One connection from a command: a line from it, then as many to it as there is to say."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._received = connection, b""
        connection.setblocking(False)

    def fileno(self) -> int:
        return self._connection.fileno()

    def read(self) -> dict[str, Any] | None:
        """Its request, once that is here whole. Raises ValueError: it hung up, or talks
        nonsense.
        """
        try:
            received = self._connection.recv(LONGEST_LINE_BYTES)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ValueError(str(error)) from error
        self._received += received
        line, end, _ = self._received.partition(b"\n")
        if not end:
            if not received or len(self._received) > LONGEST_LINE_BYTES:
                raise ValueError("no line of JSON")
            return None
        request = json.loads(line)
        if not isinstance(request, dict):
            raise ValueError("no JSON object")
        return request

    def say(self, **words: Any) -> None:
        """Send a line; somebody who has hung up does without."""
        with contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(words).encode() + b"\n")

    def close(self) -> None:
        self._connection.close()


class ControlServer:
    """The launcher's end. As a context, it takes the socket away at its end.

    Args: directory: of the run. sign: the name of the file that is in the directory once this run
        has claimed it; nobody can call before.
    """

    def __init__(self, directory: Path, sign: str) -> None:
        self.path = directory.absolute() / NAME
        self.sign = self.path.parent / sign
        self._listener: socket.socket | None = None
        self._inode = -1
        self._callers: list[ControlConnection] = []
        self._problem = ""

    def __enter__(self) -> ControlServer:
        return self

    def __exit__(self, *_: object) -> None:
        for caller in self._callers:
            caller.close()
        if self._listener is not None:
            self._listener.close()
        with contextlib.suppress(OSError):
            if self.path.lstat().st_ino == self._inode:  # else another launcher's
                self.path.unlink()

    @property
    def is_pending(self) -> bool:
        """Whether nobody listens yet, and `open` has not failed."""
        return self._listener is None and not self._problem

    @property
    def is_due(self) -> bool:
        """Whether `open` is to be called: the directory is there, and nobody listens in it yet."""
        return self.is_pending and self.sign.exists()

    def open(self) -> str:
        """Begin to listen. Returns why nobody can call, where that is so; empty otherwise."""
        listener = socket.socket(socket.AF_UNIX)
        try:
            self._inode = self._bind(listener)
        except OSError as error:
            listener.close()
            self._problem = error.strerror or str(error)
        else:
            self._listener = listener
        return self._problem

    @property
    def sources(self) -> list[Any]:
        """What can be waited for."""
        return [] if self._listener is None else [self._listener, *self._callers]

    def accept_requests(self) -> list[tuple[ControlConnection, dict[str, Any]]]:
        """The requests that have come, each with who is to be answered and hung up on."""
        if self._listener is not None:
            self._accept(self._listener)
        requests = []
        for caller in list(self._callers):
            try:
                request = caller.read()
            except ValueError as error:
                self._callers.remove(caller)
                caller.say(refused=f"this is no request: {error}")
                caller.close()
                continue
            if request is not None:
                self._callers.remove(caller)
                requests.append((caller, request))
        return requests

    def _bind(self, listener: socket.socket) -> int:
        """The inode of the socket."""
        self._refuse_company()
        aside = self.path.with_name(f"{NAME}.new")
        aside.unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            with short_name(aside) as name:
                listener.bind(name)
        finally:
            os.umask(before)
        listener.listen(MOST_CALLERS)
        listener.setblocking(False)
        aside.replace(self.path)  # from now on it is answered
        return self.path.lstat().st_ino

    def _refuse_company(self) -> None:
        """Raises OSError where the name is taken, but for what a launcher that was killed has
        left.
        """
        if not os.path.lexists(self.path):
            return
        if not self.path.is_socket():
            raise OSError(f"{self.path} is in the way")
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(ConnectionRefusedError):
            with short_name(self.path) as name:
                probe.connect(name)
            raise OSError("another launcher listens there")

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = listener.accept()
                if len(self._callers) < MOST_CALLERS:
                    self._callers.append(ControlConnection(connection))
                else:
                    connection.close()
