"""How the ranks of a group find out who is on one host, and reach each other's memory. Collective.

      [1] every rank notes in the group's store: which host it is on, and where its memory is
      [2] it opens the memory of all others on its host
      [3] it notes whether it could; only if all could, the host's memory is used

A host is a machine since its last start, seen from one process namespace: containers that do not
see each other's processes are several hosts. SHOAL_HOST names another one, which is how several
hosts are tried out on one machine."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.distributed.distributed_c10d import Store

from shoal.platform.processes import boot_id
from shoal.shm_backend import native
from shoal.shm_backend.phase_board import SIZE_BYTES
from shoal.shm_backend.segment import AttachedSegment, SharedSegment, attach


@dataclass(frozen=True)
class Topology:
    """Who is where.

    Attributes:
        hosts: the ranks on each host, hosts in the order of their first ranks.
        memory: this rank's own; None where some host's ranks cannot reach each other.
        reached: the memory of the other ranks on this host.
        pids: processes of those ranks.
        compiled: all ranks have what express.py needs.
        reason: why there is no memory.
    """

    hosts: tuple[tuple[int, ...], ...]
    memory: SharedSegment | None
    reached: dict[int, AttachedSegment]
    pids: dict[int, int]
    compiled: bool
    reason: str = ""


class _RendezvousRecord(NamedTuple):
    """One rank's entry in the group's store.

    Args:
        memory: the description of its memory; empty where it has none.
        compiled: the version of its compiled steps; 0 for none.
    """

    host_id: str
    pid: int
    memory: Mapping[str, Any]
    compiled: int


def rendezvous(store: Store, rank: int, size: int) -> Topology:
    """Meet all ranks of a group. Collective."""
    memory, problem = _create_segment()
    description = memory.description if memory is not None else {}
    own = _RendezvousRecord(host_id(), os.getpid(), description, native.version())
    ranks = [
        _RendezvousRecord(*fields) for fields in _all_gather(store, "here", rank, size, own)
    ]  # [1]
    neighbours = [
        other for other in range(size) if other != rank and ranks[other].host_id == own.host_id
    ]
    reached = _attach_peers(ranks, neighbours)  # [2]
    problem = problem or _out_of_reach(rank, ranks, neighbours, reached)
    problems = _all_gather(store, "reached", rank, size, problem)  # [3]
    if memory is not None:
        memory.close()  # every rank that wanted it has opened it
    reason = next(filter(None, problems), "")
    return Topology(
        hosts=_by_host(ranks),
        memory=None if reason else memory,
        reached=reached,
        pids={other: ranks[other].pid for other in neighbours},
        compiled=all(each.compiled == native.VERSION for each in ranks),
        reason=reason,
    )


def _all_gather(store: Store, key: str, rank: int, size: int, value: Any) -> list[Any]:
    """Every rank's value, as JSON has it, in the order of ranks. Collective."""
    store.set(f"{key}/{rank}", json.dumps(value))
    return [json.loads(store.get(f"{key}/{other}")) for other in range(size)]


def _attach_peers(
    ranks: Sequence[_RendezvousRecord], neighbours: Sequence[int]
) -> dict[int, AttachedSegment]:
    """The memory of those neighbours whose memory can be opened."""
    attached = {other: attach(ranks[other].memory) for other in neighbours}
    return {other: memory for other, memory in attached.items() if memory is not None}


def _out_of_reach(
    rank: int,
    ranks: Sequence[_RendezvousRecord],
    neighbours: Sequence[int],
    reached: Mapping[int, AttachedSegment],
) -> str:
    """A sentence about the first neighbour whose memory cannot be opened; empty for none."""
    missing = next((other for other in neighbours if other not in reached), None)
    if missing is None:
        return ""
    where = f"/proc/{ranks[missing].pid}/fd"
    return f"rank {rank} cannot open the memory of rank {missing} ({where})"


def _by_host(ranks: Sequence[_RendezvousRecord]) -> tuple[tuple[int, ...], ...]:
    """The ranks of each host, hosts in the order of their first ranks."""
    names = [each.host_id for each in ranks]
    return tuple(
        tuple(rank for rank, name in enumerate(names) if name == wanted)
        for wanted in dict.fromkeys(names)
    )


def host_id() -> str:
    """Which host this is: the same text for processes that can reach each other's memory."""
    if name := os.environ.get("SHOAL_HOST"):
        return name
    namespace = ""
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()} {boot_id()} {namespace}"


def _create_segment() -> tuple[SharedSegment | None, str]:
    try:
        memory = SharedSegment(SIZE_BYTES)
    except OSError as error:
        return None, f"{SIZE_BYTES >> 20} MiB of shared memory could not be had: {error}"
    if not memory.description:
        return None, "this system has no memory without a name to share (memfd_create)"
    return memory, ""
