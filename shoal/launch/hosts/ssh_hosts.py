"""Lists of hosts to start ranks on: `a:2,user@b:2,[fd00::1]:2`."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.errors import UsageError, printable

ENTRY = re.compile(r"(?P<user>[^@]*@)?(\[(?P<bracketed>[^\]]*)\]|(?P<name>[^:]*))(:(?P<count>.*))?")
# The user's ssh_config may put a host's name into a shell command (ProxyCommand ... %h).
UNSAFE = re.compile(r"""[\s'"`$\\;&<>|(){}\[\]*?!#~/,\x00-\x1f\x7f]""")


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


def parse_hosts(text: str) -> list[SshHost]:
    """Return the hosts of a list such as `a:2,user@b:2,[fd00::1]:2,c`, in its order.

    Raises:
        UsageError: it names no host, one host twice, or something that is no host. It lists all
            problems.
    """
    hosts, problems = _read(text, "HOST or HOST:RANKS", ", with the sum")
    _raise_problems("--hosts", problems)
    return hosts


def parse_server_hosts(text: str, hosts: Sequence[SshHost]) -> list[SshHost]:
    """Return the hosts of a list for parameter servers alone, such as `a,user@b`.

    Args: hosts: those of ranks.

    Raises:
        UsageError: as `parse_hosts`; or a host has ranks.
    """
    found, problems = _read(text, "HOST", "")
    problems += [
        f"{host}: it has servers and no ranks, so no number. --strategy server=N "
        "says how many servers all hosts have together"
        for host in found
        if host.count > 1
    ]
    problems += [
        f"{host.name} has ranks, by --hosts, and servers would share its machine. "
        "Name another host, or leave --server-hosts out to have servers beside the ranks"
        for host in found
        if host.name in [other.name for other in hosts]
    ]
    _raise_problems("--server-hosts", problems)
    return [SshHost(host.name, 0) for host in found]


def _read(text: str, form: str, once: str) -> tuple[list[SshHost], list[str]]:
    """Return the hosts of a list, and its problems.

    Args:
        form: how a host is written.
        once: how to name a host once that is named twice.
    """
    hosts: list[SshHost] = []
    problems: list[str] = []
    for entry in text.split(","):
        try:
            host = _host(entry.strip(), form)
        except ValueError as error:
            problems.append(str(error))
            continue
        if any(other.name == host.name for other in hosts):
            problems.append(f"{host.name} is named twice. Name it once{once}")
        hosts.append(host)
    return hosts, problems


def _raise_problems(option: str, problems: Sequence[str]) -> None:
    if problems:
        lines = [f"{option}: {problem}" for problem in problems]
        raise UsageError("\n  ".join(["The hosts cannot be used:", *lines]))


def _host(entry: str, form: str) -> SshHost:
    """Return the host of `[user@]name[:count]`. Raises ValueError."""
    if not entry:
        raise ValueError(f"a host without a name. Write {form}")
    if _is_ipv6(entry.rpartition("@")[2]):
        raise ValueError(f"write an IPv6 address in brackets: [{entry}] or [{entry}]:2")
    match = ENTRY.fullmatch(entry)
    if match is None:
        raise ValueError(
            f"{printable(entry)} is no host. Write HOST, HOST:RANKS or [ADDRESS]:RANKS"
        )
    user, count = match["user"] or "", match["count"]
    name = match["name"] if match["bracketed"] is None else match["bracketed"]
    if match["bracketed"] is not None and not _is_ipv6(name):
        raise ValueError(f"[{printable(name)}] is no IPv6 address")
    _check_name(user.removesuffix("@"), "user", form) if user else None
    _check_name(name, "host", form)
    if count is not None and not (count.isascii() and count.isdigit() and 0 < int(count) <= 10_000):
        raise ValueError(f"{printable(entry)}: the number of ranks must be 1 to 10000")
    return SshHost(user + name, int(count or 1))


def _check_name(name: str, kind: str, form: str) -> None:
    """Refuse names that ssh would take for options, or a shell for commands."""
    if not name:
        raise ValueError(f"a {kind} without a name. Write {form}")
    if name.startswith("-"):
        raise ValueError(f"a {kind} cannot begin with '-': {printable(name)}")
    if UNSAFE.search(name):
        raise ValueError(f"{printable(name)} has a character that no name of a {kind} has")


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True
