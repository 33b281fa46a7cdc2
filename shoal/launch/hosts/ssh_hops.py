"""The server that a client connects to first, and how many clients may start there at a time.

An ssh server drops connections that are not authenticated yet beyond its limit, MaxStartups, which
is 10 where nobody has changed it. A hundred hosts have a hundred servers, but behind one jump host
(ProxyJump, ProxyCommand) all clients meet at its server.
"""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from shoal.launch.hosts.ssh_command import ssh_program
from shoal.platform.cgroups import usable_cores

MOST_OF_HOP = 8
"""Clients that start at a time at one server."""
STARTS_OF_CORE, MOST_STARTS = 8, 32
"""Clients that start at a time at all servers, by cores of this machine, which computes their keys.

Four times as many at a time are no sooner ready, and the unlucky among them wait for START_S.
"""
UNKNOWN = ""
SETTINGS_S = 5.0


def first_hop(settings: str) -> str:
    """Return the first server of a connection, from the settings that `ssh -G HOST` prints.

    UNKNOWN where they do not say it.
    """
    values: dict[str, str] = {}
    for line in settings.splitlines():
        name, _, value = line.partition(" ")
        values.setdefault(name.lower(), value.strip())
    jump, command = values.get("proxyjump", "none"), values.get("proxycommand", "none")
    if jump != "none":
        return f"jump {jump.split(',')[0]}"
    if command != "none":
        return f"command {command}"
    hostname, port = values.get("hostname", ""), values.get("port", "")
    return f"{hostname} {port}" if hostname else UNKNOWN


def first_hops(names: Sequence[str]) -> list[str]:
    """Return the first server for each host. `ssh -G` is asked, which connects to nothing.

    Args:
        names: of hosts, as ssh takes them.

    Raises:
        UsageError: SHOAL_SSH cannot be divided into words.
    """
    client = [*ssh_program(), "-G", "--"]
    with ThreadPoolExecutor(MOST_OF_HOP) as pool:
        return list(pool.map(lambda name: first_hop(_settings([*client, name])), names))


def _settings(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SETTINGS_S,
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""


def may_start(host: int, starting: Collection[int], hops: Mapping[int, str]) -> bool:
    """Return True if the client of a host may start now.

    Args:
        starting: the hosts whose clients are starting.
        hops: the first server of each host; UNKNOWN ones count as one server.
    """
    hop = hops.get(host, UNKNOWN)
    beside = sum(hops.get(other, UNKNOWN) == hop for other in starting)
    return len(starting) < most_starts() and beside < MOST_OF_HOP


def most_starts() -> int:
    """Return the number of clients that may start at a time at all servers together."""
    return min(MOST_STARTS, STARTS_OF_CORE * usable_cores())
