"""Rendezvous of the ranks of a group: find the ranks of each host, and attach their segments.

      [1] every rank writes its host and its segment into the store of the group
      [2] it attaches the segments of the other ranks on its host
      [3] it writes whether it could; the segments are used only if all ranks could

A host is a machine since its last boot, seen from one process namespace: containers that do not see
each other's processes are several hosts. SHOAL_HOST overrides the host, to try several hosts on one
machine. Collective.

Under torchrun, srun and mpirun whoever reaches the port of the store writes into it. So entries are
read as those of a stranger: what is no entry ends the rank by an error, and what this rank knows
itself is never read back."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from torch.distributed.distributed_c10d import Store

from shoal.errors import CollectiveFailed, printable
from shoal.platform.processes import host_id
from shoal.shm_backend import native
from shoal.shm_backend.phase_board import SIZE_BYTES
from shoal.shm_backend.segment import Segment, SharedSegment, attach

T = TypeVar("T")
LONGEST_ENTRY_BYTES = 1 << 16
LONGEST_PROBLEM = 1000
LARGEST_PID = 1 << 22  # of Linux


@dataclass(frozen=True)
class Topology:
    """The hosts of a group, and the segments of its ranks if they are on one host.

    Attributes:
        num_hosts: the number of hosts.
        memory: the segment of this rank; None if ranks are on several hosts, or some host's ranks
            cannot attach each other's.
        attached: the segments of the other ranks on this host.
        pids: processes of those ranks; empty if their segments cannot be attached.
        compiled: True if all ranks have the compiled steps of `native.py`.
        reason: what is wrong with the memory of a host; empty if nothing is.
    """

    num_hosts: int
    memory: SharedSegment | None
    attached: dict[int, Segment]
    pids: dict[int, int]
    compiled: bool
    reason: str = ""


class _RendezvousRecord(NamedTuple):
    """One rank's entry in the store of the group.

    Args:
        host_id: the same text on all ranks of a host.
        memory: the description of its segment; empty if it has none.
        compiled: the version of its compiled steps; 0 if it has none.
    """

    host_id: str
    pid: int
    memory: Mapping[str, Any]
    compiled: int


def rendezvous(store: Store, rank: int, size: int) -> Topology:
    """Exchange hosts and segments with all ranks of a group. Collective."""
    memory: SharedSegment | None = None
    problem = ""
    try:
        memory = SharedSegment(SIZE_BYTES)
    except OSError as error:
        problem = f"{SIZE_BYTES >> 20} MiB of shared memory could not be had: {error}"
    description = memory.description if memory is not None else {}
    record = _RendezvousRecord(host_id("pid"), os.getpid(), description, native.version())
    records = _all_gather(store, "here", rank, size, record, _checked_record)  # [1]
    neighbours = [
        peer
        for peer, entry in enumerate(records)
        if peer != rank and entry.host_id == record.host_id
    ]
    segments = {peer: attach(records[peer].memory) for peer in neighbours}  # [2]
    attached = {peer: segment for peer, segment in segments.items() if segment is not None}
    if not problem and len(attached) < len(segments):
        peer = next(peer for peer in neighbours if peer not in attached)
        path = f"/proc/{records[peer].pid}/fd"
        problem = f"rank {rank} cannot open the memory of rank {peer} ({path})"
    problems = _all_gather(store, "reached", rank, size, problem, _checked_problem)  # [3]
    if memory is not None:
        memory.close()  # all ranks have attached it by now
    reason = next(filter(None, problems), "")
    num_hosts = len({entry.host_id for entry in records})
    return Topology(
        num_hosts=num_hosts,
        memory=None if reason or num_hosts > 1 else memory,
        attached=attached,
        pids={} if reason else {peer: records[peer].pid for peer in neighbours},
        compiled=all(entry.compiled == native.VERSION for entry in records),
        reason=reason,
    )


def _all_gather(
    store: Store, key: str, rank: int, size: int, own: T, check: Callable[[Any], T]
) -> list[T]:
    """Return the value of every rank, in the order of ranks. Collective.

    Args: check: returns the value of another rank, given its entry of JSON. Raises ValueError or
        TypeError for what is none.

    Raises: CollectiveFailed: an entry is none of Shoal's.
    """
    store.set(f"{key}/{rank}", json.dumps(own))
    values: list[T] = []
    for peer in range(size):
        if peer == rank:  # what this rank knows itself is never read back
            values.append(own)
            continue
        entry = store.get(f"{key}/{peer}")[:LONGEST_ENTRY_BYTES]
        try:
            values.append(check(json.loads(entry)))
        except (ValueError, TypeError, RecursionError) as error:
            raise CollectiveFailed(
                f"the entry of rank {peer} in the store of the ranks was not written by Shoal: "
                f"{error}. Either ranks run different versions of Shoal, or a stranger writes into "
                "the store; docs/security.md tells who can."
            ) from error
    return values


def _checked_record(entry: Any) -> _RendezvousRecord:
    record = _RendezvousRecord(*entry)
    # Exact kinds, for True is an int. The kernel vouches for the process whose memory it is; the
    # same process is watched.
    kinds = [type(field) for field in record]
    if kinds != [str, int, dict, int] or record.memory.get("pid", record.pid) != record.pid:
        raise ValueError("it is no record")
    if not 0 < record.pid <= LARGEST_PID:
        raise ValueError("it names no process")
    return record


def _checked_problem(answer: Any) -> str:
    """Return the problem that a rank has told, fit for a log; empty if it has none."""
    if not isinstance(answer, str):
        raise TypeError("it is no text")
    return printable(answer[:LONGEST_PROBLEM])
