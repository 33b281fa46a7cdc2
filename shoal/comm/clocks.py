"""By how much the clocks of other hosts differ from rank 0's.

      rank 0   t0 ── ping ──╮           ╭── t3          offset = t1 - (t0 + t3) / 2
      rank r                ╰──> t1 ────╯               wrong by (t3 - t0) / 2 at most

The shortest of several rounds tells most (Cristian, "Probabilistic clock synchronization", 1989).
Processes of one host
read one clock: theirs need no exchange, and are not made worse by one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from shoal.comm.mesh import Mesh
from shoal.platform.processes import boot_id

ROUNDS = 16


class ClockOffset(NamedTuple):
    """Args: ahead_ns: how far a rank's clock is ahead of rank 0's. error_ns: what that may be
    wrong by.
    """

    ahead_ns: int
    error_ns: int


def clock_id(name: str) -> str:
    """Alike for processes that read one monotonic clock: those of one running kernel. Args:
    name: of this host.
    """
    return boot_id() or name


def offsets(
    mesh: Mesh, clock: str, now: Callable[[], int] = time.monotonic_ns
) -> list[ClockOffset]:
    """Of every rank, as rank 0 has measured; zeros on other ranks. Collective.

    Args: clock: alike where ranks read the same one. now: that clock, in nanoseconds.
    """
    clocks = mesh.all_gather_str(clock)
    found = [ClockOffset(0, 0)] * mesh.size
    for rank in range(1, mesh.size):
        if clocks[rank] == clocks[0]:
            continue
        if mesh.rank == 0:
            found[rank] = _ask(mesh, rank, now)
        elif mesh.rank == rank:
            _serve_pings(mesh, now)
    return found


def _ask(mesh: Mesh, rank: int, now: Callable[[], int]) -> ClockOffset:
    number = torch.zeros(1, dtype=torch.int64, device=mesh.device)
    rounds = []
    for _ in range(ROUNDS):
        sent_ns = now()
        dist.send(number, rank)
        dist.recv(number, rank)
        there_ns = int(number)  # waits for the device
        back_ns = now()
        rounds.append(
            ClockOffset(there_ns - (sent_ns + back_ns) // 2, (back_ns - sent_ns) // 2 + 1)
        )
    return min(rounds, key=lambda one: one.error_ns)


def _serve_pings(mesh: Mesh, now: Callable[[], int]) -> None:
    number = torch.zeros(1, dtype=torch.int64, device=mesh.device)
    for _ in range(ROUNDS):
        dist.recv(number, 0)
        number.fill_(now())
        dist.send(number, 0)
