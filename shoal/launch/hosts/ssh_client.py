"""The ssh client that starts an agent: its command line, its process, and its failures.

OpenSSH's client is run as it is installed, with the user's own configuration: aliases, ports, jump
hosts, keys, certificates and known hosts. The options here only take away what would disturb:
questions, terminals, forwardings, and a master connection that would outlive the run. A master that
the user has opened is used.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import shlex
import signal
import subprocess
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from shoal.errors import UsageError, printable
from shoal.launch.failure import end_of_process
from shoal.launch.hosts.agent_session import MARKER

# The user's ssh_config may put a host's name into a shell command (ProxyCommand ... %h), and ssh
# takes what begins with '-' for an option.
WORD = r"[\w.+%][\w.+%-]*"
ENTRY = re.compile(
    rf"(?P<user>{WORD}@)?(\[(?P<ipv6>[\w.:%-]*)\]|(?P<name>{WORD}))(:(?P<count>[1-9][0-9]{{0,3}}))?"
)


@dataclass(frozen=True)
class SshHost:
    """One host as the user named it.

    Args:
        name: given to ssh as its destination: an alias of ssh_config, a name, an address, each with
            `user@` before it or not. An IPv6 address stands without brackets.
        count: ranks to start there; 0 where it is for parameter servers alone.
    """

    name: str
    count: int

    def __str__(self) -> str:
        user, at, host = self.name.rpartition("@")
        host = f"[{host}]" if ":" in host else host
        return f"{user}{at}{host}" + (f":{self.count}" if self.count else "")


def parse_hosts(text: str, of_ranks: Sequence[SshHost] | None = None) -> list[SshHost]:
    """Return the hosts of a list such as `a:2,user@b:2,[fd00::1]:2,c`, in its order.

    Args:
        of_ranks: for a list of hosts of parameter servers alone: those that have ranks.

    Raises:
        UsageError: it names no host, one host twice, or something that is no host; or a host of
            servers has ranks. It lists all problems.
    """
    hosts: list[SshHost] = []
    problems: list[str] = []
    for entry in map(str.strip, text.split(",")):
        host = _host(entry)
        if host is None:
            problems.append(
                f"{printable(repr(entry))} is no host. Write HOST, HOST:RANKS or [ADDRESS]:RANKS "
                "of an IPv6 address, with 1 to 9999 ranks; USER@ may stand before it"
            )
            continue
        if any(other.name == host.name for other in hosts):
            problems.append(f"{host.name} is named twice. Name it once")
        if of_ranks is not None and host.count > 1:
            problems.append(f"{host}: it has no ranks, so no number; --strategy says how many")
        if host.name in [other.name for other in of_ranks or ()]:
            problems.append(f"{host.name} has ranks, by --hosts. Name another host")
        hosts.append(host if of_ranks is None else SshHost(host.name, 0))
    if problems:
        option = "--hosts" if of_ranks is None else "--server-hosts"
        lines = [f"{option}: {problem}" for problem in problems]
        raise UsageError("\n  ".join(["The hosts cannot be used:", *lines]))
    return hosts


def _host(entry: str) -> SshHost | None:
    """Return the host of `[user@]name[:count]`; None for another text."""
    match = ENTRY.fullmatch(entry)
    if match is None:
        return None
    user, count = match["user"] or "", int(match["count"] or 1)
    if match["ipv6"] is None:
        return SshHost(user + match["name"], count)
    with suppress(ValueError):
        ipaddress.IPv6Address(match["ipv6"])
        return SshHost(user + match["ipv6"], count)
    return None


MOST_NOISE_BYTES = 1 << 16
KEPT_LINES = 20
READ_BYTES = 1 << 16
VARIABLE = "SHOAL_SSH"
CONNECT_S = 8
SSH_FAILED = 255
NOT_FOUND = 127
# Single quotes keep all other characters in sh, bash, dash, csh, tcsh and fish alike.
UNQUOTABLE = re.compile(r"['!\\\x00-\x1f\x7f]")
QUOTED_LINES = 3
SILENT = "ssh lost the connection without a word, or the login shell was killed"
UNRESOLVED = "could not resolve"  # in small letters, as OpenSSH says it of a name
CURES = {
    "kex_exchange": "Too many clients at once? The server's MaxStartups limits them",
    UNRESOLVED: "Is the name right? An alias belongs into ~/.ssh/config",
    "connection refused": "Is an ssh server running there, at that port?",
    "timed out": "Is the host up, and does a firewall let ssh through?",
    "no route to host": "Is the host up, and is this machine in its network?",
    "network is unreachable": "Is the host up, and is this machine in its network?",
}


class SshClient:
    """The client that connects to one host.

    Start-up files of the login shell may print, and may read: so the agent speaks first, and what
    comes before its marker is no message.

    Args:
        command: see `agent_command`.

    Attributes:
        protocol: of the agent, from its marker; empty before.
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
        self.errors: deque[str] = deque(maxlen=KEPT_LINES)
        self._before_marker = b""
        self._unsent = b""
        pipes = self._process.stdin, self._process.stdout, self._process.stderr
        self._streams = [stream for stream in pipes if stream is not None]
        for stream in self._streams:
            os.set_blocking(stream.fileno(), False)

    @property
    def sources(self) -> list[IO[bytes]]:
        """Return the streams to wait for."""
        return [stream for stream in self._streams[1:] if not stream.closed]

    @property
    def noise(self) -> list[str]:
        """Return the last lines before the marker."""
        return self._before_marker.decode(errors="replace").splitlines()[-KEPT_LINES:]

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
        self._before_marker = before
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
        self.read_errors()
        for stream in self._streams:
            stream.close()


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


def ssh_program() -> list[str]:
    """Return the words of the ssh client: those of the variable SHOAL_SSH, else `ssh`.

    Raises:
        UsageError: SHOAL_SSH cannot be divided into words.
    """
    try:
        return shlex.split(os.environ.get(VARIABLE, "")) or ["ssh"]
    except ValueError as error:
        raise UsageError(
            f"{VARIABLE}={os.environ[VARIABLE]} cannot be divided into words: {error}."
        ) from error


def agent_command(host: str, python: str, lease_s: float, ssh: Sequence[str]) -> list[str]:
    """Return the command that starts an agent on `host` with its three standard streams connected.

    It is to be started in a session of its own, so that the terminal's Ctrl-C does not reach it.

    Args:
        host: the name of an SshHost.
        python: the interpreter there: an absolute path, or a name on the PATH of that host.
        lease_s: the lease of the agent; the client gives up a silent connection in about that time.
        ssh: the words of the client, as of `ssh_program`.

    Raises:
        UsageError: a shell there would not find the interpreter's path as it is.
    """
    options = {
        "BatchMode": "yes",
        "ControlMaster": "no",
        "ControlPersist": "no",
        "ConnectTimeout": CONNECT_S,
        "ConnectionAttempts": 1,
        "ServerAliveInterval": max(1, round(lease_s / 4)),
        "ServerAliveCountMax": 3,
        "LogLevel": "ERROR",
        "UpdateHostKeys": "no",
        "PermitLocalCommand": "no",
        "ClearAllForwardings": "yes",
        "RemoteCommand": "none",
        "RequestTTY": "no",
    }
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    return [*ssh, "-T", "-x", "-a", *words, "--", host, _remote_line(python)]


def _remote_line(python: str) -> str:
    """Return the line for the login shell of the host.

    Python puts the directory in which `-m` is started in front of its path of modules, and a
    home directory may well have a clone named `shoal`: the agent starts in the root directory.
    """
    if UNQUOTABLE.search(python) or not re.match(r"/|[^-/][^/]*$", python):
        raise UsageError(
            f"--python {printable(repr(python))}: a login shell there would not find it. Give an "
            "absolute path without ' ! \\ and control characters; a symbolic link to the "
            "interpreter of the environment does."
        )
    return f"cd / && exec {shlex.quote(python)} -X utf8 -u -m shoal agent"


def describe_ssh_failure(
    host: str,
    exit_code: int | None,
    stderr_lines: Sequence[str],
    output_lines: Sequence[str],
    python: str,
) -> str:
    """Return one problem: why no agent spoke over this connection, with the cure.

    Args:
        exit_code: of the client; negative for a signal; None where it had not ended in time.
        stderr_lines: its standard error.
        output_lines: the last lines of its standard output, without the agent's marker.
        python: the interpreter that was asked for.
    """
    quoted = _quoted(stderr_lines)
    text = quoted.lower()
    if exit_code == SSH_FAILED:
        problem = f"ssh says: {quoted}" if quoted else SILENT
        by_hand = f"Log in once by hand: ssh {host}"
        cure = next((cure for reason, cure in CURES.items() if reason in text), by_hand)
    elif exit_code == NOT_FOUND or "command not found" in text or "unknown command" in text:
        problem, cure = f"no {python} there", "Give --python, or install Shoal there"
    elif "no module named" in text and "shoal" in text:
        problem, cure = f"{python} there has no Shoal", "Install it there, or give --python"
    else:
        problem = "no agent answered in time"
        if exit_code is not None:
            end = end_of_process(exit_code)
            problem = f"the login shell ended without starting the agent: it {end}"
        shown = _quoted([*stderr_lines, *output_lines]) or "nothing"
        problem += f"; it printed: {shown}"
        waits = exit_code is None
        reason = "A start-up file of the login shell may wait for input. " if waits else ""
        cure = f"{reason}Log in once by hand, and look at its start-up files: ssh {host}"
    return f"host {printable(host)}: {problem.rstrip('.')}. {cure}"


def _quoted(lines: Sequence[str]) -> str:
    """Return the last lines that are not blank, as one line."""
    full = [printable(line.strip()) for line in lines if line.strip()]
    return " | ".join(full[-QUOTED_LINES:])
