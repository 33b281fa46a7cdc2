"""The pairs of hosts that do not reach each other, and the most hosts that all reach each other.

A driver may reach two hosts whose own link is cut. Ranks that start then cannot connect.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, count

from shoal.launch.hosts.addresses import candidate_addresses
from shoal.launch.hosts.host_checks import ANSWER_S
from shoal.launch.hosts.host_connections import HostConnections
from shoal.launch.hosts.reach import Reach

MOST_BRANCHES = 1000
"""The most branches of the search for the largest group: heartbeats of hosts wait for its end."""


@dataclass(frozen=True)
class PartedPair:
    """Two hosts that answer the driver and do not reach each other.

    Args:
        hosts: their numbers, the smaller first.
        problem: of each address that was tried.
    """

    hosts: tuple[int, int]
    problem: str

    def describe(self, connections: HostConnections) -> str:
        """Return the names of the two, with the problem."""
        first, second = map(connections.name, self.hosts)
        return f"{second} and {first} cannot reach each other ({self.problem})"


def parted_pairs(connections: HostConnections, sources: Mapping[int, str]) -> list[PartedPair]:
    """Let all pairs of connected hosts try to reach each other, and return those that do not.

    All try at once; where packets are lost it takes a few seconds (see `try_reach`).

    Args:
        sources: the own address that ranks of a host used last. All addresses of a host are tried
            where it is not known, or is none of the host's any more.

    Raises:
        LaunchError: a host does not answer.
    """
    hosts = connections.connected
    nonce = secrets.token_hex(16)
    listen = {
        host: {
            "question": "listen",
            "addresses": _addresses(connections, host, sources.get(host)),
            "nonce": nonce,
        }
        for host in hosts
    }
    listening = connections.ask(listen, ANSWER_S)
    pairs = list(combinations(hosts, 2))
    # The later host connects to the earlier one, which connects back.
    questions = [
        (second, {"question": "reach", "ports": listening[first]["ports"], "nonce": nonce})
        for first, second in pairs
    ]
    answers = connections.ask_all(questions, ANSWER_S)
    connections.ask({host: {"question": "unlisten"} for host in hosts}, ANSWER_S)
    found = []
    for pair, answer in zip(pairs, answers, strict=True):
        tries = [Reach.from_json(item) for item in answer["found"]]
        if all(one.problem for one in tries):
            tried = "; ".join(f"{one.address}: {one.problem}" for one in tries)
            found.append(PartedPair(pair, tried or "no address to listen at"))
    return found


def _addresses(connections: HostConnections, host: int, source: str | None) -> list[str]:
    facts = connections.facts[host]
    if source is not None and source in [own.address for own in facts.addresses]:
        return [source]
    return candidate_addresses(facts.addresses, facts.ssh_address)


def largest_group(room: Mapping[int, int], parted: Sequence[PartedPair]) -> list[int]:
    """Return the most hosts of which no two are parted.

    Of several such groups it is the one with room for the most ranks, then that of the first hosts.
    Where dozens of pairs are parted without a pattern, there may be a larger group.

    Args:
        room: the most ranks of each host.
    """
    partners: dict[int, set[int]] = {host: set() for host in room}
    for first, second in (pair.hosts for pair in parted):
        partners[first].add(second)
        partners[second].add(first)

    branches = count()

    def merit(group: frozenset[int]) -> tuple[int, int, list[int]]:
        return len(group), sum(room[host] for host in group), [-host for host in sorted(group)]

    def best_of(hosts: frozenset[int]) -> frozenset[int]:
        """Return the best group within `hosts`: without the most parted one, or with it."""
        most = max(hosts, key=lambda host: len(partners[host] & hosts), default=None)
        others = hosts & partners[most] if most is not None else frozenset()
        if most is None or not others:
            return hosts
        if len(others) == 1:  # then all are parted from one other at most, and pairs are apart
            (other,) = others
            return best_of(hosts - {min(most, other, key=lambda host: (room[host], -host))})
        without = best_of(hosts - {most})
        if next(branches) > MOST_BRANCHES:
            return without
        return max(without, best_of(hosts - others), key=merit)

    return sorted(best_of(frozenset(room)))
