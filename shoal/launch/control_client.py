"""The control channel on the side of a command: its request, and the launcher's answers."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.errors import LaunchError, UsageError
from shoal.launch.control_server import NAME, short_name


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
        except (FileNotFoundError, ConnectionRefusedError):
            raise LaunchError(
                f"no launcher on this machine has {directory}: nobody trains in it, or one process "
                "that nobody has started, or ranks of torchrun, srun or mpirun. Start it with "
                "`shoal train ... -n N`."
            ) from None
        except OSError as error:
            raise LaunchError(
                f"the launcher of {directory} cannot be called: {error.strerror or error}."
            ) from error
        try:
            connection.sendall(json.dumps(request).encode() + b"\n")
            yield from _answers(connection, directory)
        except (BrokenPipeError, ConnectionResetError):
            raise LaunchError(
                f"the launcher of {directory} has hung up: it has ended, or too many call it."
            ) from None


def _answers(connection: socket.socket, directory: Path) -> Iterator[dict[str, Any]]:
    with connection.makefile() as lines:
        for line in lines:
            answer = json.loads(line)
            if "refused" in answer:
                raise UsageError(f"{directory}: {answer['refused']}")
            yield answer
