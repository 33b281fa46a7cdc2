"""The checks of all hosts before any rank starts, and the address at which ranks meet.

Every problem of every host comes in one list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shoal.errors import LaunchError
from shoal.launch.hosts.addresses import candidate_addresses, choose_address
from shoal.launch.hosts.host_connections import HostConnections
from shoal.launch.hosts.host_facts import FactsRequest, HostFacts
from shoal.launch.hosts.ssh_hosts import SshHost
from shoal.launch.rank_info import LOOPBACK

ANSWER_S = 15.0
PREPARE_S = 300.0
"""For the import of torch on the slowest host."""

Checked = Sequence[tuple[SshHost, HostFacts]]


def find_meeting(
    connections: HostConnections, choice: str | None, hosts: Sequence[int]
) -> tuple[dict[int, str], int]:
    """Prepare hosts for ranks; find the address of the first at which all others reach it.

    Args: choice: the user's, of the first host of the list, which may be lost by now.

    Returns: that address of the first host, and of each other its own on the way there, by number;
        and the port of the socket at the first.
    Raises:
        LaunchError: there is none; the message says who cannot reach whom.
        UsageError: the user's choice is none of its addresses.
    """
    first, *others = hosts
    facts = connections.facts[first]
    candidates = [LOOPBACK]
    if others:
        candidates = candidate_addresses(
            facts.addresses, facts.ssh_address, choice if first == 0 else None
        )
    prepare = {
        host: {"question": "prepare", "addresses": candidates if host == first else []}
        for host in hosts
    }
    ports = connections.ask(prepare, PREPARE_S)[first]["ports"]
    if not ports:
        listed = ", ".join(candidates)
        raise LaunchError(f"host {connections.name(first)}: it cannot listen at {listed}.")
    reach = {"question": "reach", "ports": ports}
    answers = connections.ask(dict.fromkeys(others, reach), ANSWER_S)
    reached = {host: answer["reached"] for host, answer in answers.items()}
    reports = {connections.name(host): reaches for host, reaches in reached.items()}
    address = choose_address(connections.name(first), ports, reports)
    sources = {host: reaches[address][0] for host, reaches in reached.items()}
    return {first: address, **sources}, ports[address]


def problems(hosts: Checked, request: FactsRequest, here: HostFacts) -> list[str]:
    """Return all reasons for which the run cannot start; empty where it can.

    Args:
        hosts: every host that answered, with its facts, in the user's order.
        request: which the facts answer.
        here: the facts of the driver's own host, whose Shoal and script the others must have.
    """
    found = _repeated(hosts)
    for host, facts in hosts:
        found += [f"host {host.name}: {text}" for text in _own(host, facts, request)]
    for host, facts in hosts:
        first, first_facts = hosts[0]
        if facts.source != here.source:
            found.append(
                f"host {host.name} has another Shoal ({facts.shoal}, source {facts.source[:8]}; "
                f"here it is {here.shoal}, source {here.source[:8]}). Install the same there"
            )
        found += [f"host {host.name} {text}" for text in _versions(facts, first, first_facts)]
        digests = {facts.script_digest, here.script_digest}
        if host.count and None not in digests and len(digests) > 1:
            found.append(
                f"host {host.name}: {request.script} is not the file of this machine. Copy it there"
            )
    return found


def _repeated(hosts: Checked) -> list[str]:
    """Return a problem for each host that is another one under a second name."""
    first: dict[str, SshHost] = {}
    found = []
    for host, facts in hosts:
        other = first.setdefault(facts.identity, host)
        if other is host:
            continue
        cure = f"name it once, {SshHost(other.name, other.count + host.count)}"
        if other.count and not host.count:
            cure = "servers would share its machine with ranks. Leave it out of --server-hosts"
        found.append(f"host {host.name} is host {other.name} ({facts.hostname}): {cure}")
    return found


def _own(host: SshHost, facts: HostFacts, request: FactsRequest) -> Iterator[str]:
    """Yield problems of one host for which no other host matters."""
    if facts.torch is None:
        yield "torch is not installed for its Python. Give --python, or install it"
    if not host.count:  # servers read and write no file
        return
    if not facts.cwd_exists:
        yield f"there is no directory {request.cwd} that you can enter. Make it there"
    elif request.script is not None and facts.script_digest is None:
        yield f"{request.script} cannot be read in {request.cwd}. Copy it there"
    if not facts.can_write:
        yield f"you cannot write to the run directory {request.run_directory}"


def _versions(facts: HostFacts, first: SshHost, wanted: HostFacts) -> Iterator[str]:
    """Yield versions in which a host differs from the first one."""
    if facts.python.split(".")[:2] != wanted.python.split(".")[:2]:
        yield f"has Python {facts.python}, {first.name} has {wanted.python}. Give --python"
    if facts.torch and wanted.torch:
        # Without the label of the build: 2.13.0 of 2.13.0+cu130.
        releases = {version.partition("+")[0] for version in (facts.torch, wanted.torch)}
        if len(releases) > 1:
            yield f"has torch {facts.torch}, {first.name} has {wanted.torch}"
