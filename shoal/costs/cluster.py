"""Hosts, the memory of their ranks and the links between them, as a tree.

    hosts:
      a: {ranks: 8, memory: 80GiB, inside: {bandwidth: 450GB/s}, link: {bandwidth: 50GB/s}}
      b: {ranks: 8, memory: 80GiB, inside: {bandwidth: 450GB/s}, link: {bandwidth: 50GB/s, to: r}}
    switches:
      r: {bandwidth: 200GB/s, latency: 3us, to: core}
      core: {}
    machine: h100              # a preset, or a file of `shoal calibrate`
    mtbf: 50000h               # mean time between failures of one rank

Ranks are numbered host by host, in the order of the file. `bandwidth` is one way. Hosts with
`ranks: 0` are those of `--server-hosts`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from shoal.errors import ConfigError, did_you_mean, raise_problems

_SIZES = {"": 1, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SIZES |= {f"{prefix}i": 2 ** (10 * power) for power, prefix in enumerate("KMGT", 1)}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


class Link(NamedTuple):
    """A link of a host or a switch to the one above it.

    Attributes: bandwidth: bytes/s, one way. latency_s: of one message. to: name of a switch.
    """

    bandwidth: float
    latency_s: float = 2e-6
    to: str = ""


class Host(NamedTuple):
    """A host: its ranks, each with so much memory, and its links."""

    name: str
    ranks: int
    memory_bytes: float
    inside: Link
    link: Link


@dataclass(frozen=True)
class Cluster:
    """Hosts and switches.

    Attributes:
        hosts: those with ranks.
        machine: a preset or a file; "" for this machine.
        mtbf_s: mean time between failures of one rank; inf if unknown.
        server_hosts: those that have parameter servers alone.
    """

    hosts: tuple[Host, ...]
    switches: Mapping[str, Link]
    machine: str = ""
    mtbf_s: float = math.inf
    server_hosts: tuple[Host, ...] = ()

    @cached_property
    def ranks(self) -> int:
        return sum(host.ranks for host in self.hosts)

    @cached_property
    def ranks_per_host(self) -> int:
        return max(host.ranks for host in self.hosts)

    @cached_property
    def _narrowest(self) -> tuple[Link, Link]:
        """The narrowest link inside a host, and the narrowest one out of a host."""
        inside = min((host.inside for host in self.hosts), key=lambda link: link.bandwidth)
        return inside, min((host.link for host in self.hosts), key=lambda link: link.bandwidth)

    def link_of(self, ranks: int, stride: int) -> Link:
        """Return the narrowest link that a group of ranks uses, as one of them sees it.

        Groups that leave a host at once share its link: as many as the group has neighbours there.

        Args: ranks, stride: of the group, as along an axis of the mesh.
        """
        inside, out = self._narrowest
        if ranks * stride <= self.ranks_per_host or len(self.hosts) == 1:
            return inside
        sharing = min(stride, self.ranks_per_host)
        links = [out._replace(bandwidth=out.bandwidth / sharing)]
        hosts_below = 1
        while links[-1].to in self.switches and self.switches[links[-1].to].bandwidth:
            up = self.switches[links[-1].to]
            hosts_below = max(hosts_below, sum(h.link.to == links[-1].to for h in self.hosts))
            if hosts_below < len(self.hosts):  # the group leaves this switch
                links.append(up._replace(bandwidth=up.bandwidth / sharing))
            else:
                break
        latency_s = sum(link.latency_s for link in links)
        return min(links, key=lambda link: link.bandwidth)._replace(latency_s=latency_s)

    def server_rates(self, servers: int) -> tuple[float, float]:
        """Return bytes/s of a worker and of a server, by their shares of links; inf in one host."""
        if self.server_hosts:
            _, out = self._narrowest
            most = math.ceil(servers / len(self.server_hosts))
            narrowest = min(host.link.bandwidth for host in self.server_hosts)
            return out.bandwidth / self.ranks_per_host, narrowest / most
        rate = self.link_of(self.ranks, 1).bandwidth if len(self.hosts) > 1 else math.inf
        return rate, rate


def one_host(ranks: int, memory_bytes: float, bandwidth: float = 10e9) -> Cluster:
    """Return a cluster of one host, whose ranks share its memory."""
    inside = Link(bandwidth)
    host = Host("this machine", ranks, memory_bytes / ranks, inside, inside)
    return Cluster((host,), {})


def read_size(text: Any) -> float:
    """Return bytes of "16GiB", "80 GB" or a number. Raise ValueError: also of a text of digits."""
    if isinstance(text, str) and text.strip()[-1:].isdigit():
        raise ValueError(f"'{text}' is a number without a unit")
    return _quantity(text, r"(k|[KMGT]i?)?B?", lambda unit: _SIZES[unit or ""])


def read_rate(text: Any) -> float:
    """Return bytes/s of "50GB/s" or "400 Mbit/s". Raise ValueError."""
    match = re.fullmatch(r"\s*([-+.\de]+)\s*([kMGT]?)bit/s\s*", str(text))
    if match:
        return _positive(float(match[1]), text) * _SIZES[match[2]] / 8
    return _quantity(str(text).removesuffix("/s"), r"([kMGT]i?)?B?", lambda u: _SIZES[u or ""])


def read_time(text: Any) -> float:
    """Return seconds of "5us" or "3h". Raise ValueError: also without a unit."""
    return _quantity(text, r"(us|ms|s|min|h|d)", lambda unit: _TIMES[unit])


def _quantity(text: Any, unit_pattern: str, scale: Any) -> float:
    match = re.fullmatch(rf"\s*([-+.\d]+(?:e[-+]?\d+)?)\s*{unit_pattern}\s*", str(text))
    if match is None:
        raise ValueError(f"'{text}' is not a number with a unit")
    return _positive(float(match[1]), text) * float(scale(match[2]))


def _positive(value: float, text: Any) -> float:
    if not 0 < value < math.inf:
        raise ValueError(f"{text} must be greater than 0")
    return value


def load(path: Path) -> Cluster:
    """Read a cluster file.

    Raises: ConfigError: with all problems: unknown keys, bad quantities, links in a circle.
    """
    try:
        read = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from error
    problems: list[str] = []
    cluster = _Reader(problems).cluster(read)
    raise_problems([f"{path}: {problem}" for problem in problems])
    assert cluster is not None
    return cluster


def _names_in(text: str) -> list[str]:
    """Return the hosts of `n[01-64]`, as Slurm writes them; of another text that alone."""
    found = re.fullmatch(r"([^\[\]]*)\[(\d+)-(\d+)\]([^\[\]]*)", text)
    if found is None:
        return [text]
    before, first, last, after = found.groups()
    numbers = range(int(first), int(last) + 1)
    return [f"{before}{number:0{len(first)}}{after}" for number in numbers]


class _Reader:
    """Reads a cluster file, and collects its problems."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems

    def cluster(self, read: Any) -> Cluster | None:
        if not isinstance(read, dict) or not isinstance(read.get("hosts"), dict):
            self.problems.append("hosts: name at least one host, as in hosts: {a: {ranks: 8}}")
            return None
        self._check_keys("", read, ("hosts", "switches", "machine", "mtbf"))
        switches = {
            str(name): self._link(f"switches.{name}", link or {}, needs_bandwidth=False)
            for name, link in (read.get("switches") or {}).items()
        }
        hosts: list[Host] = []
        for names, entry in read["hosts"].items():
            host = self._host(str(names), entry)
            self._check_way(host.name, host.link.to, switches)
            found = [host._replace(name=name) for name in _names_in(host.name)]
            hosts += found
            if not found:
                self.problems.append(f"hosts.{host.name}: this range has no host")
        mtbf_s = self._value("mtbf", read, read_time, math.inf)
        with_ranks = tuple(host for host in hosts if host.ranks)
        if hosts and not with_ranks:
            self.problems.append("hosts: no host has ranks")
        without = tuple(host for host in hosts if not host.ranks)
        return Cluster(with_ranks, switches, str(read.get("machine") or ""), mtbf_s, without)

    def _host(self, name: str, read: Any) -> Host:
        where = f"hosts.{name}"
        if not isinstance(read, dict):
            self.problems.append(f"{where}: give ranks, memory, inside and link")
            read = {}
        self._check_keys(where, read, ("ranks", "memory", "inside", "link"))
        ranks = read.get("ranks", 1)
        if type(ranks) is not int or ranks < 0:
            self.problems.append(f"{where}.ranks: {ranks} is not a whole number, 0 or above")
            ranks = 1
        memory = self._value("memory", read, read_size, 0.0, where)
        inside = self._link(f"{where}.inside", read.get("inside") or {"bandwidth": "10GB/s"})
        link = self._link(f"{where}.link", read.get("link") or {"bandwidth": "1.25GB/s"})
        return Host(name, ranks, memory, inside, link)

    def _link(self, where: str, read: Any, needs_bandwidth: bool = True) -> Link:
        if not isinstance(read, dict):
            self.problems.append(f"{where}: give bandwidth, latency and to")
            return Link(1.0)
        self._check_keys(where, read, ("bandwidth", "latency", "to"))
        if needs_bandwidth and "bandwidth" not in read:
            self.problems.append(f"{where}.bandwidth: is missing, as in 50GB/s or 400Mbit/s")
        return Link(
            self._value("bandwidth", read, read_rate, 0.0, where),
            self._value("latency", read, read_time, 2e-6, where),
            str(read.get("to") or ""),
        )

    def _value(
        self, key: str, read: Mapping[str, Any], parse: Any, default: float, where: str = ""
    ) -> float:
        if key not in read:
            return default
        try:
            return float(parse(read[key]))
        except ValueError as error:
            self.problems.append(f"{where + '.' if where else ''}{key}: {error}")
            return default

    def _check_keys(self, where: str, read: Mapping[str, Any], known: tuple[str, ...]) -> None:
        for key in read.keys() - {*known}:
            path = f"{where}.{key}" if where else str(key)
            self.problems.append(f"{path}: is not known; {did_you_mean(str(key), known)}")

    def _check_way(self, host: str, to: str, switches: Mapping[str, Link]) -> None:
        """Follow the links of a host upwards."""
        seen: list[str] = []
        while to:
            if to not in switches:
                self.problems.append(f"hosts.{host}: its way leads to '{to}', which is no switch")
                return
            if to in seen:
                circle = " -> ".join([*seen[seen.index(to) :], to])
                problem = f"switches: the links lead in a circle: {circle}"
                if problem not in self.problems:
                    self.problems.append(problem)
                return
            seen.append(to)
            to = switches[to].to
