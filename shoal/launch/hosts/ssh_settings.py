"""The settings by which the ssh client would reach each host, read with `ssh -G`."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.launch.hosts.ssh_command import ssh_program

STARTS_AT_ONE_SERVER = 8
"""Connections that may be starting at one ssh server at a time; it drops some from its tenth on."""
STARTS_AT_ONCE = 32
"""Connections that may be starting at a time altogether."""
READ_S = 10


@dataclass(frozen=True)
class SshSettings:
    """The effective settings of the client for one host.

    Args:
        host: as it is given to ssh.
        hostname: the name or address to which the client connects.
        port: the port there.
        user: the user there.
        jump: the first server on the way, or the command that makes the connection; None where the
            client connects to the host itself.
    """

    host: str
    hostname: str
    port: int
    user: str
    jump: str | None

    @property
    def first_server(self) -> str:
        """Return the server to which the client itself connects.

        At most STARTS_AT_ONE_SERVER connections to it may be starting at a time.
        """
        return self.jump or f"{self.hostname}:{self.port}"


def read_settings(host: str, ssh: Sequence[str] | None = None) -> SshSettings | None:
    """Return the settings for `host`, without connecting to it.

    Args:
        ssh: the words of the client; those of `ssh_program` where it is None.

    Returns:
        None where the client does not tell them: it is not OpenSSH's, or refuses its configuration.
    """
    command = [*(ssh_program() if ssh is None else ssh), "-G", "--", host]
    try:
        printed = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=READ_S,
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = printed.stdout.decode(errors="backslashreplace").splitlines()
    values = dict(line.split(" ", 1) for line in lines if " " in line)
    port = values.get("port", "")
    if printed.returncode != 0 or "hostname" not in values or not port.isdecimal():
        return None
    jump = values.get("proxyjump", values.get("proxycommand", "none"))
    return SshSettings(
        host,
        values["hostname"],
        int(port),
        values.get("user", ""),
        None if jump == "none" else jump.split(",")[0] if "proxyjump" in values else jump,
    )


def repeated_hosts(settings: Sequence[SshSettings]) -> list[str]:
    """Return a problem for each group of names that lead to one user, host and port.

    Hosts behind a command of the user's own are left out, for it may look at the name.
    """
    names: dict[tuple[object, ...], list[str]] = {}
    for one in settings:
        if one.jump is None or " " not in one.jump:
            place = (one.user, one.hostname.lower(), one.port, one.jump)
            names.setdefault(place, []).append(one.host)
    return [
        f"{' and '.join(group)} are one host ({hostname}, port {port}). Name it once, with the sum "
        "of its ranks"
        for (_, hostname, port, _), group in names.items()
        if len(group) > 1
    ]
