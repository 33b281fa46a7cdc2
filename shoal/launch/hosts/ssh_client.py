"""One ssh client of the driver: its process, and the bytes to and from the agent behind it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections import deque
from collections.abc import Sequence
from typing import IO

from shoal.errors import UsageError
from shoal.launch.hosts.agent_messages import MARKER

MOST_NOISE_BYTES = 1 << 16
KEPT_LINES = 20
READ_BYTES = 1 << 16


class SshClient:
    """The client that connects to one host.

    Start-up files of the login shell may print, and may read: so the agent speaks first, and what
    comes before its marker is no message.

    Args:
        command: see `ssh_command.agent_command`.

    Attributes:
        protocol: of the agent, from its marker; empty before.
        noise: the last lines before the marker.
        errors: the last lines of standard error.

    Raises:
        UsageError: there is no such program.
    """

    def __init__(self, command: Sequence[str]) -> None:
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,  # Ctrl-C reaches the driver alone, which decides
            )
        except OSError as error:
            raise UsageError(
                f"the ssh client '{command[0]}' cannot be started: {error.strerror}. Install "
                "OpenSSH's client, or name another one by SHOAL_SSH."
            ) from error
        self.protocol = ""
        self.noise: deque[str] = deque(maxlen=KEPT_LINES)
        self.errors: deque[str] = deque(maxlen=KEPT_LINES)
        self._before_marker = b""
        self._unsent = b""
        self._streams = [_pipe(stream) for stream in self._pipes()]

    @property
    def sources(self) -> list[IO[bytes]]:
        """Return the streams to wait for."""
        return [stream for stream in self._streams[1:] if not stream.closed]

    @property
    def exit_code(self) -> int | None:
        """Return the client's exit code; None while it runs."""
        return self._process.poll()

    @property
    def has_unsent(self) -> bool:
        """Return True if the connection could not take all bytes yet."""
        return bool(self._unsent)

    def read(self) -> bytes | None:
        """Return bytes of the agent, empty at the end of the connection, None where none came."""
        data = _read(self._streams[1])
        if not data or self.protocol:
            return data
        self._before_marker += data
        before, found, rest = self._before_marker.partition(f"\n{MARKER} ".encode())
        line, is_whole, rest = rest.partition(b"\n")
        if not found or not is_whole:
            is_noise = len(self._before_marker) > MOST_NOISE_BYTES
            return b"" if is_noise else None
        self._keep_noise(before)
        self.protocol = line.split(b" ")[0].decode(errors="replace")
        return rest or None

    def read_errors(self) -> list[str]:
        """Return lines that came on standard error."""
        data = _read(self._streams[2])
        if not data:
            return []
        lines = data.decode(errors="replace").splitlines()
        self.errors.extend(lines)
        return lines

    def send(self, data: bytes) -> None:
        """Send bytes, as many as the connection takes now; call again with none for the rest."""
        self._unsent += data
        stream = self._streams[0]
        if self._unsent and not stream.closed:
            try:
                self._unsent = self._unsent[os.write(stream.fileno(), self._unsent) :]
            except BlockingIOError:
                pass
            except OSError:  # the end of its output says the same
                self._unsent = b""

    def close_input(self) -> None:
        """Let the agent see the end of its input: it ends, and the client with it."""
        self._streams[0].close()

    def close(self, limit_s: float = 0.0) -> None:
        """End the client, after `limit_s` by a signal."""
        self.close_input()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_s)
        if self._process.returncode is None:
            # Its session: a client may have started a helper, such as a jump host's client.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if not self.protocol:
            self._keep_noise(self._before_marker)
        self.read_errors()
        for stream in self._streams:
            stream.close()

    def _keep_noise(self, data: bytes) -> None:
        self.noise.extend(data.decode(errors="replace").splitlines())

    def _pipes(self) -> list[IO[bytes] | None]:
        return [self._process.stdin, self._process.stdout, self._process.stderr]


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    os.set_blocking(stream.fileno(), False)
    return stream


def _read(stream: IO[bytes]) -> bytes | None:
    """Return what can be read, empty at the end, which closes the stream; None for nothing."""
    if stream.closed:
        return b""
    try:
        data = os.read(stream.fileno(), READ_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        data = b""
    if not data:
        stream.close()
    return data
