"""The settings by which the ssh client would reach each host, read with `ssh -G`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

STARTS_AT_ONE_SERVER = 8
"""Connections that may be starting at one ssh server at a time; it drops some from its tenth on."""
STARTS_AT_ONCE = 32
"""Connections that may be starting at a time altogether."""


@dataclass(frozen=True)
class SshSettings:
    """The effective settings of the client for one host.

    Args:
        host: as it is given to ssh.
        hostname: the name or address to which the client connects.
        port: the port there.
        user: the user there.
        jump: the first server on the way; None where the client connects to the host itself.
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
    raise NotImplementedError


def repeated_hosts(settings: Sequence[SshSettings]) -> list[str]:
    """Return a problem for each group of names that lead to one user, host and port."""
    raise NotImplementedError
