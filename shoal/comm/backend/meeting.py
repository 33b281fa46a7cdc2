"""How the ranks of a group find out who is on one host, and reach each other's memory. Collective.

      [1] every rank notes in the group's store: which host it is on, and where its memory is
      [2] it opens the memory of all others on its host
      [3] it notes whether it could; only if all could, the host's memory is used

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
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import Store

from shoal.comm.backend import express
from shoal.comm.backend.exchange import SIZE_BYTES
from shoal.comm.memory import Attached, Memory, attach


@dataclass(frozen=True)
class Meeting:
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
    memory: Memory | None
    reached: dict[int, Attached]
    pids: dict[int, int]
    compiled: bool
    reason: str = ""


def meet(store: Store, rank: int, size: int) -> Meeting:
    """Meet all ranks of a group. Collective."""
    memory, problem = _own_memory()
    mine = {"host": host(), "pid": os.getpid(), "memory": _description(memory), "problem": problem}
    mine["compiled"] = express.version()
    store.set(f"here/{rank}", json.dumps(mine))  # [1]
    found = [json.loads(store.get(f"here/{other}")) for other in range(size)]
    neighbours = [other for other in range(size) if other != rank and found[other]["host"] == mine["host"]]
    reached = _reach(found, neighbours)  # [2]
    if not problem and len(reached) < len(neighbours):
        missing = min(set(neighbours) - set(reached))
        problem = f"rank {rank} cannot open the memory of rank {missing} (/proc/{found[missing]['pid']}/fd)"
    store.set(f"reached/{rank}", problem)  # [3]
    said = [store.get(f"reached/{other}").decode() for other in range(size)]
    if memory is not None:
        memory.close()  # everybody who wanted it has opened it
    names = [each["host"] for each in found]
    hosts = tuple(tuple(r for r in range(size) if names[r] == name) for name in dict.fromkeys(names))
    pids = {other: found[other]["pid"] for other in neighbours}
    reason = next(filter(None, said), "")
    compiled = all(each["compiled"] == express.VERSION for each in found)
    return Meeting(hosts, None if reason else memory, reached, pids, compiled, reason)


def _description(memory: Memory | None) -> dict[str, Any]:
    return memory.description if memory is not None else {}


def _reach(found: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> dict[int, Attached]:
    return {rank: memory for rank in ranks if (memory := attach(found[rank]["memory"])) is not None}


def host() -> str:
    """Which host this is: the same text for processes that can reach each other's memory."""
    if name := os.environ.get("SHOAL_HOST"):
        return name
    boot = namespace = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()} {boot} {namespace}"


def _own_memory() -> tuple[Memory | None, str]:
    try:
        memory = Memory(SIZE_BYTES)
    except OSError as error:
        return None, f"{SIZE_BYTES >> 20} MiB of shared memory could not be had: {error}"
    if not memory.description:
        return None, "this system has no memory without a name to share (memfd_create)"
    return memory, ""
