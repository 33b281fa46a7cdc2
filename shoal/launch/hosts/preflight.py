"""The comparison of all hosts before any rank starts: every problem of every host in one list."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shoal.launch.hosts.host_facts import PROTOCOL, FactsRequest, HostFacts
from shoal.launch.hosts.ssh_hosts import SshHost

CLOCK_S = 5.0
"""Clocks that differ by more are told."""
GB = 1e9

Checked = Sequence[tuple[SshHost, HostFacts]]


def problems(
    hosts: Checked,
    request: FactsRequest,
    here: HostFacts | None = None,
    checkpoint_bytes: int | None = None,
) -> list[str]:
    """Return all reasons for which the run cannot start; empty where it can.

    Args:
        hosts: every host that answered, with its facts, in the user's order.
        request: which the facts answer.
        here: the facts of the driver's own host, whose Shoal and script the others must have; the
            first host takes its place where it is None.
        checkpoint_bytes: bytes of one checkpoint, if they are known.
    """
    found = _repeated(hosts)
    for host, facts in hosts:
        found += [f"host {host.name}: {text}" for text in _own(facts, request, checkpoint_bytes)]
    if not hosts:
        return found
    first, first_facts = hosts[0]
    where, wanted = (f"{first.name} has", first_facts) if here is None else ("here it is", here)
    for host, facts in hosts:
        found += [f"host {host.name} {text}" for text in _other_code(facts, wanted, where)]
        found += [f"host {host.name} {text}" for text in _versions(facts, first, first_facts)]
        if _is_changed(facts.script_digest, wanted.script_digest):
            copy = "this machine" if here is not None else first.name
            found.append(
                f"host {host.name}: {request.script} is not the file of {copy}. Copy it there"
            )
    return found


def _repeated(hosts: Checked) -> list[str]:
    """Return a problem for each host that is another one under a second name."""
    first: dict[str, SshHost] = {}
    found = []
    for host, facts in hosts:
        other = first.setdefault(facts.identity, host)
        if other is not host:
            total = (other.processes or 1) + (host.processes or 1)
            found.append(
                f"host {host.name} is host {other.name} ({facts.hostname}): name it once, "
                f"{SshHost(other.name, total)}"
            )
    return found


def _own(facts: HostFacts, request: FactsRequest, checkpoint_bytes: int | None) -> Iterator[str]:
    """Yield problems of one host for which no other host matters."""
    if facts.torch is None:
        yield "torch is not installed for its Python. Give --python, or install it"
    if not facts.cwd_exists:
        yield f"there is no directory {request.cwd} that {facts.user} can enter. Make it there"
    elif request.script is not None and facts.script_digest is None:
        yield f"{request.script} cannot be read in {request.cwd}. Copy it there"
    if request.run_directory is None:
        return
    if facts.run_disk_bytes is None:
        yield f"{facts.user} cannot write to the run directory {request.run_directory}"
    elif checkpoint_bytes is not None and facts.run_disk_bytes < checkpoint_bytes:
        yield (
            f"{facts.run_disk_bytes / GB:.1f} GB free for {request.run_directory}, "
            f"a checkpoint needs about {checkpoint_bytes / GB:.1f} GB"
        )


def _other_code(facts: HostFacts, wanted: HostFacts, where: str) -> Iterator[str]:
    """Yield the difference between a host's Shoal and the one that is wanted."""
    if facts.protocol != PROTOCOL:
        yield f"has Shoal {facts.shoal}, with another protocol: {where} {wanted.shoal}"
    elif facts.source != wanted.source:
        yield (
            f"has another Shoal ({facts.shoal}, source {facts.source[:8]}; {where} "
            f"{wanted.shoal}, source {wanted.source[:8]}). Install the same there"
        )


def _versions(facts: HostFacts, first: SshHost, wanted: HostFacts) -> Iterator[str]:
    """Yield versions in which a host differs from the first one."""
    if _minor(facts.python) != _minor(wanted.python):
        yield f"has Python {facts.python}, {first.name} has {wanted.python}. Give --python"
    if facts.torch and wanted.torch and _release(facts.torch) != _release(wanted.torch):
        yield f"has torch {facts.torch}, {first.name} has {wanted.torch}"


def _is_changed(digest: str | None, wanted: str | None) -> bool:
    return digest is not None and wanted is not None and digest != wanted


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def _release(version: str) -> str:
    """Return a version without the label of its build: 2.13.0 of 2.13.0+cu130."""
    return version.partition("+")[0]


def notes(hosts: Checked, received_s: Sequence[float] = ()) -> list[str]:
    """Return what the user should know and what does not keep the run from starting.

    Args:
        received_s: for each host the driver's clock when its facts came, with which that host's
            clock is compared. Empty leaves clocks out.
    """
    found = []
    for index, (host, facts) in enumerate(hosts):
        late_s = facts.time_s - received_s[index] if received_s else 0.0
        if abs(late_s) > CLOCK_S:
            side = "ahead" if late_s > 0 else "behind"
            found.append(f"host {host.name}: its clock is {abs(late_s):.0f} s {side}")
        if host.processes is not None and host.processes > facts.cores:
            found.append(
                f"host {host.name}: {host.processes} ranks on {_counted(facts.cores, 'core')}"
            )
    builds = {facts.torch for _, facts in hosts if facts.torch}
    if len({_release(build) for build in builds}) == 1 < len(builds):
        found.append(f"hosts have several builds of torch: {', '.join(sorted(builds))}")
    return found


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
