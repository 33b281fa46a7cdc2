"""The checks of all hosts before any rank starts, and the address at which ranks meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.errors import LaunchError
from shoal.launch.hosts import preflight
from shoal.launch.hosts.addresses import Reach, candidate_addresses, choose_address
from shoal.launch.hosts.host_connections import HostConnections
from shoal.launch.hosts.host_facts import FactsRequest, collect_facts
from shoal.launch.hosts.remote_work import HostsOptions

ANSWER_S = 15.0
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Meeting:
    """The network of the ranks.

    Args:
        address: of the first host, at which all ranks meet.
        port: of the socket there.
        sources: the own address of each host on the way there, by number.
    """

    address: str
    port: int
    sources: dict[int, str]


def host_problems(
    connections: HostConnections, request: FactsRequest, failed: Sequence[str]
) -> list[str]:
    """Return all problems of all hosts, those that could not be connected first."""
    known = [(connections.hosts[host], connections.facts[host]) for host in connections.connected]
    here = collect_facts(request)
    return [*failed, *preflight.problems(known, request, here)]


def host_notes(connections: HostConnections) -> list[str]:
    """Return what the user should know, and what does not keep the run from starting."""
    known = [(connections.hosts[host], connections.facts[host]) for host in connections.connected]
    # The first host may have told its facts long before the last one.
    received_s = [connections.received_s[host] for host in connections.connected]
    return preflight.notes(known, received_s)


def find_meeting(
    connections: HostConnections, options: HostsOptions, hosts: Sequence[int]
) -> Meeting:
    """Return the address of the first of `hosts` at which all others reach it.

    Raises:
        LaunchError: there is none; the message says who cannot reach whom.
        UsageError: the user's choice is none of its addresses.
    """
    first, *others = hosts
    facts = connections.facts[first]
    # The user's choice is about the first host of the list, which may be lost by now.
    choice = (options.address, options.interface) if first == 0 else (None, None)
    candidates = [LOOPBACK]
    if others:
        candidates = candidate_addresses(facts.addresses, facts.ssh_address, *choice)
    listen = {"question": "listen", "addresses": candidates}
    ports = connections.ask({first: listen}, ANSWER_S)[first]["ports"]
    reach = {"question": "reach", "ports": ports}
    answers = connections.ask(dict.fromkeys(others, reach), ANSWER_S)
    found = {
        host: [Reach(*outcome) for outcome in answer["found"]] for host, answer in answers.items()
    }
    reports = {connections.name(host): reaches for host, reaches in found.items()}
    address = choose_address(connections.name(first), candidates, reports)
    if not isinstance(address, str):
        raise LaunchError("\n  ".join(["The hosts cannot reach each other:", *address]))
    if address not in ports:
        raise LaunchError(f"host {connections.name(first)}: it cannot listen at {address}.")
    sources = {first: address}
    for host, reaches in found.items():
        source = next(reach.source for reach in reaches if reach.address == address)
        sources[host] = source or address
    return Meeting(address, ports[address], sources)
