"""The control channel: a Unix socket of the launcher in the directory of its run.

A command sends one line of JSON, and the launcher answers in lines of JSON:

    shoal scale RUN 6 ── {"scale": 6} ──────────────────────────> RUN/.control ── launcher
                      <── {"stopping": 4}, {"step": 47}, or {"refused": "why"} ──
    shoal servers RUN ── {"secret": true}, of a run on several hosts ────────> RUN/.control
                      <── {"secret": "0f..."} ──

The socket has mode 0600, so only the user who started the run can connect. It exists as long as the
launcher does. The launcher reads JSON only, one line of at most `MAX_LINE_BYTES` from each caller.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shoal.errors import LaunchError, UsageError

NAME = ".control"
MAX_LINE_BYTES = 4096
MAX_WAITING = 16
READ_S = 1.0
"""For the line of a command, which sends it as soon as it is connected."""


@contextmanager
def short_name(path: Path) -> Iterator[str]:
    """Yield a name of the socket `path` that is short enough for bind and connect (107 bytes).

    Every path has one: through the file descriptor of its directory.
    """
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def send(connection: socket.socket, **message: Any) -> None:
    """Send one line to a command. One that has closed the connection gets none."""
    with suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")


def _request_of(connection: socket.socket) -> dict[str, Any]:
    """Return the request of a command. Raises OSError after READ_S, ValueError for another text."""
    connection.settimeout(READ_S)
    with connection.makefile("rb") as lines:
        line = lines.readline(MAX_LINE_BYTES)
    request = json.loads(line) if line.endswith(b"\n") else None
    if not isinstance(request, dict):
        raise ValueError("no line with a JSON object")
    return request


class ControlServer:
    """The socket of a run and its connections. As a context, it removes the socket at its end.

    Args:
        directory: the directory of the run.
        marker: the name of a file that the run writes into the directory when it claims it. The
            socket is made after that, for before, another run could own the directory.
    """

    def __init__(self, directory: Path, marker: str) -> None:
        self.path = directory.absolute() / NAME
        self.marker = self.path.parent / marker
        self._listener: socket.socket | None = None
        self._inode = -1
        self._problem = ""

    def __enter__(self) -> ControlServer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._listener is not None:
            self._listener.close()
        with suppress(OSError):
            if self.path.lstat().st_ino == self._inode:  # otherwise it is another launcher's
                self.path.unlink()

    @property
    def is_pending(self) -> bool:
        """Return True before `open` has succeeded or failed."""
        return self._listener is None and not self._problem

    def open(self) -> str:
        """Start to listen, once the run has claimed its directory.

        Returns:
            Why no command can connect; empty on success. The run continues in both cases.
        """
        if not (self.is_pending and self.marker.exists()):
            return ""
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
        """Return the objects to wait for."""
        return [] if self._listener is None else [self._listener]

    def accept_requests(self) -> list[tuple[socket.socket, dict[str, Any]]]:
        """Return the requests that have arrived, each with its connection.

        The caller of this function answers on the connection and closes it.
        """
        requests: list[tuple[socket.socket, dict[str, Any]]] = []
        while self._listener is not None:
            try:
                caller = self._listener.accept()[0]
            except BlockingIOError:
                break
            try:
                requests.append((caller, _request_of(caller)))
            except (OSError, ValueError, RecursionError) as error:
                send(caller, refused=f"this is no request: {error}")
                caller.close()
        return requests

    def _bind(self, listener: socket.socket) -> int:
        """Bind the socket and listen. Return its inode."""
        if os.path.lexists(self.path):
            if not self.path.is_socket():
                raise OSError(f"{self.path} is in the way")
            # The socket of a killed launcher refuses the connection, and does not count.
            with socket.socket(socket.AF_UNIX) as probe, suppress(ConnectionRefusedError):
                with short_name(self.path) as name:
                    probe.connect(name)
                raise OSError("another launcher listens there")
        self.path.unlink(missing_ok=True)
        previous_mask = os.umask(0o177)
        try:
            with short_name(self.path) as name:
                listener.bind(name)
        finally:
            os.umask(previous_mask)
        listener.listen(MAX_WAITING)
        listener.setblocking(False)
        return self.path.lstat().st_ino


def request(directory: Path, **request: Any) -> Iterator[dict[str, Any]]:
    """Send a request to the launcher of the run in `directory`; yield its answers as they arrive.

    Raises:
        LaunchError: no launcher of this machine has the run, or it ended before it had answered.
        UsageError: the launcher refuses the request.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            with short_name(directory.resolve() / NAME) as name:
                connection.connect(name)
        except OSError as error:
            raise LaunchError(
                f"no launcher on this machine has {directory}: nobody trains in it, or one process "
                "that nobody has started, or ranks of torchrun, srun or mpirun. Start it with "
                f"`shoal train ... -n N`. ({error.strerror or error})"
            ) from None
        try:
            connection.sendall(json.dumps(request).encode() + b"\n")
            for line in connection.makefile():
                answer = json.loads(line)
                if "refused" in answer:
                    raise UsageError(f"{directory}: {answer['refused']}")
                yield answer
        except (BrokenPipeError, ConnectionResetError):
            raise LaunchError(f"the launcher of {directory} has hung up: it has ended.") from None
