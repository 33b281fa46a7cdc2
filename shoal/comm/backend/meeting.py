"""How the ranks of a group find out who is on one host, and reach each other's memory. Collective.

      [1] every rank notes in the group's store: which host it is on, and where its memory is
      [2] it opens the memory of all others on its host
      [3] it notes whether it could; only if all could, the host's memory is used, and likewise its rooms

A host is a machine since its last start, seen from one process namespace: containers that do not see each other's
processes are several hosts. SHOAL_HOST names another one, which is how several hosts are tried out on one machine.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch.distributed.distributed_c10d import Store

from shoal.comm.backend import express
from shoal.comm.backend.exchange import SIZE_BYTES
from shoal.comm.backend.room import Room, make_room
from shoal.comm.memory import Attached, Memory, attach
from shoal.processes import boot_id


@dataclass(frozen=True)
class Meeting:
    """Who is where.

    Attributes:
        hosts: the ranks on each host, hosts in the order of their first ranks.
        memory: this rank's own; None where some host's ranks cannot reach each other.
        reached: the memory of the other ranks on this host.
        pids: processes of those ranks.
        room: this rank's own, for tensors; None where some rank has none, or cannot reach another's.
        rooms: the memory of the other ranks' rooms on this host.
        compiled: all ranks have what express.py needs.
        reason: why there is no memory.
    """

    hosts: tuple[tuple[int, ...], ...]
    memory: Memory | None
    reached: dict[int, Attached]
    pids: dict[int, int]
    room: Room | None
    rooms: dict[int, Attached]
    compiled: bool
    reason: str = ""


def meet(store: Store, rank: int, size: int) -> Meeting:
    """Meet all ranks of a group. Collective."""
    memory, problem = _own_memory()
    room = make_room(size)
    room_memory = room.memory if room is not None else None
    mine = {"host": host(), "pid": os.getpid(), "memory": _description(memory), "problem": problem}
    mine["compiled"] = express.version()
    store.set(f"here/{rank}", json.dumps({**mine, "room": _description(room_memory)}))  # [1]
    found = [json.loads(store.get(f"here/{other}")) for other in range(size)]
    neighbours = [other for other in range(size) if other != rank and found[other]["host"] == mine["host"]]
    reached = _reach(found, neighbours, "memory")  # [2]
    rooms = _reach(found, neighbours, "room", with_head=False)
    if not problem and len(reached) < len(neighbours):
        missing = min(set(neighbours) - set(reached))
        problem = f"rank {rank} cannot open the memory of rank {missing} (/proc/{found[missing]['pid']}/fd)"
    store.set(f"reached/{rank}", json.dumps([problem, room is not None and len(rooms) == len(neighbours)]))  # [3]
    said = [json.loads(store.get(f"reached/{other}")) for other in range(size)]
    for own in (memory, room_memory):
        if own is not None:
            own.close()  # everybody who wanted it has opened it
    names = [each["host"] for each in found]
    hosts = tuple(tuple(r for r in range(size) if names[r] == name) for name in dict.fromkeys(names))
    pids = {other: found[other]["pid"] for other in neighbours}
    reason = next((text for text, _ in said if text), "")
    compiled = all(each["compiled"] == express.VERSION for each in found)
    if not all(has_rooms for _, has_rooms in said):
        room, rooms = None, {}
    return Meeting(hosts, None if reason else memory, reached, pids, room, rooms, compiled, reason)


def _description(memory: Memory | None) -> dict[str, Any]:
    return memory.description if memory is not None else {}


def _reach(
    found: Sequence[Mapping[str, Any]], ranks: Sequence[int], what: str, with_head: bool = True
) -> dict[int, Attached]:
    return {rank: memory for rank in ranks if (memory := attach(found[rank][what], with_head)) is not None}


def host() -> str:
    """Which host this is: the same text for processes that can reach each other's memory."""
    if name := os.environ.get("SHOAL_HOST"):
        return name
    namespace = ""
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()} {boot_id()} {namespace}"


def _own_memory() -> tuple[Memory | None, str]:
    try:
        memory = Memory(SIZE_BYTES)
    except OSError as error:
        return None, f"{SIZE_BYTES >> 20} MiB of shared memory could not be had: {error}"
    if not memory.description:
        return None, "this system has no memory without a name to share (memfd_create)"
    return memory, ""
