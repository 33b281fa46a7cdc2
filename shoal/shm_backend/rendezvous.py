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
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.distributed.distributed_c10d import Store

from shoal.errors import CollectiveFailed, printable
from shoal.platform.processes import boot_id
from shoal.shm_backend import native
from shoal.shm_backend.phase_board import SIZE_BYTES
from shoal.shm_backend.segment import AttachedSegment, SharedSegment, attach

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
    attached: dict[int, AttachedSegment]
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
    memory, problem = _create_segment()
    description = memory.description if memory is not None else {}
    record = _RendezvousRecord(host_id(), os.getpid(), description, native.version())
    entries = _all_gather(store, "here", rank, size, record)  # [1]
    records = [_checked_record(peer, entry) for peer, entry in enumerate(entries)]
    neighbours = [
        peer
        for peer, entry in enumerate(records)
        if peer != rank and entry.host_id == record.host_id
    ]
    attached = _attach_peers(records, neighbours)  # [2]
    problem = problem or _attach_problem(rank, records, neighbours, attached)
    answers = _all_gather(store, "reached", rank, size, problem)  # [3]
    problems = [_checked_problem(peer, answer) for peer, answer in enumerate(answers)]
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


def _all_gather(store: Store, key: str, rank: int, size: int, value: Any) -> list[Any]:
    """Return the JSON value of every rank, in the order of ranks. Collective.

    Raises: CollectiveFailed: an entry is no JSON.
    """
    store.set(f"{key}/{rank}", json.dumps(value))
    return [
        value if peer == rank else _parsed(peer, store.get(f"{key}/{peer}")) for peer in range(size)
    ]


def _parsed(peer: int, entry: bytes) -> Any:
    if len(entry) > LONGEST_ENTRY_BYTES:
        raise _not_by_shoal(peer, f"it has {len(entry)} bytes")
    try:
        return json.loads(entry)
    except (ValueError, RecursionError) as error:
        raise _not_by_shoal(peer, "it is no JSON") from error


def _checked_record(peer: int, entry: Any) -> _RendezvousRecord:
    """Return the entry of a rank as a record.

    Raises: CollectiveFailed: it is none.
    """
    if not isinstance(entry, Sequence) or len(entry) != len(_RendezvousRecord._fields):
        raise _not_by_shoal(peer, "it is no record")
    record = _RendezvousRecord(*entry)
    # Exact kinds, for True is an int.
    kinds = (type(record.host_id), type(record.pid), type(record.memory), type(record.compiled))
    if kinds != (str, int, dict, int):
        raise _not_by_shoal(peer, "it is no record")
    if not 0 < record.pid <= LARGEST_PID:
        raise _not_by_shoal(peer, f"it names process {record.pid}")
    # The kernel vouches for the process whose memory it is; the same process is watched.
    if record.memory and record.memory.get("pid") != record.pid:
        raise _not_by_shoal(peer, "it names two processes")
    return record


def _checked_problem(peer: int, answer: Any) -> str:
    """Return the problem that a rank has told, fit for a log; empty if it has none.

    Raises: CollectiveFailed: it is no text.
    """
    if not isinstance(answer, str):
        raise _not_by_shoal(peer, "it is no text")
    return printable(answer[:LONGEST_PROBLEM])


def _not_by_shoal(peer: int, fact: str) -> CollectiveFailed:
    return CollectiveFailed(
        f"the entry of rank {peer} in the store of the ranks was not written by Shoal: {fact}. "
        "Either ranks run different versions of Shoal, or a stranger writes into the store; "
        "docs/security.md tells who can."
    )


def _attach_peers(
    records: Sequence[_RendezvousRecord], neighbours: Sequence[int]
) -> dict[int, AttachedSegment]:
    """Return the segments that can be attached, by rank."""
    segments = {peer: attach(records[peer].memory) for peer in neighbours}
    return {peer: segment for peer, segment in segments.items() if segment is not None}


def _attach_problem(
    rank: int,
    records: Sequence[_RendezvousRecord],
    neighbours: Sequence[int],
    attached: Mapping[int, AttachedSegment],
) -> str:
    """Return a sentence about the first segment that is not attached; empty if all are."""
    missing = next((peer for peer in neighbours if peer not in attached), None)
    if missing is None:
        return ""
    path = f"/proc/{records[missing].pid}/fd"
    return f"rank {rank} cannot open the memory of rank {missing} ({path})"


def host_id() -> str:
    """Return a text that is the same for processes that can attach each other's segments."""
    if name := os.environ.get("SHOAL_HOST"):
        return name
    namespace = ""
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()} {boot_id()} {namespace}"


def _create_segment() -> tuple[SharedSegment | None, str]:
    """Return this rank's segment and an empty string, or None and the reason."""
    try:
        memory = SharedSegment(SIZE_BYTES)
    except OSError as error:
        return None, f"{SIZE_BYTES >> 20} MiB of shared memory could not be had: {error}"
    if not memory.description:
        return None, "this system has no memory without a name to share (memfd_create)"
    return memory, ""
