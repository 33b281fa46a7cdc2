"""Offsets between the clocks of the hosts and rank 0's clock.

      rank 0   t0 ── ping ──╮           ╭── t3          offset = t1 - (t0 + t3) / 2
      rank r                ╰──> t1 ────╯               the error is (t3 - t0) / 2 at most

Of several rounds the shortest has the smallest error (Cristian, "Probabilistic clock
synchronization", 1989). Processes of one host read one clock, so they need no exchange, and an
exchange would only add its error.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from shoal.comm.mesh import Mesh

ROUNDS = 16


class ClockOffset(NamedTuple):
    """The offset of a rank's clock, in nanoseconds.

    Args:
        ahead_ns: how far the clock is ahead of rank 0's.
        error_ns: the largest error of `ahead_ns`.
    """

    ahead_ns: int
    error_ns: int


def offsets(
    mesh: Mesh, clock: str, now: Callable[[], int] = time.monotonic_ns
) -> list[ClockOffset]:
    """Measure the offset of every rank. Rank 0 gets the result, other ranks zeros. Collective.

    Args:
        clock: a text that is the same for processes that read one clock: those of one kernel.
        now: that clock, in nanoseconds.
    """
    clocks = mesh.all_gather_str(clock)
    measured = [ClockOffset(0, 0)] * mesh.size
    for rank in range(1, mesh.size):
        if clocks[rank] == clocks[0]:
            continue
        if mesh.rank == 0:
            measured[rank] = _ping(mesh, rank, now)
        elif mesh.rank == rank:
            _serve_pings(mesh, now)
    return measured


def _ping(mesh: Mesh, rank: int, now: Callable[[], int]) -> ClockOffset:
    """Measure one rank's offset in several rounds, and return the most exact."""
    message = torch.zeros(1, dtype=torch.int64, device=mesh.device)
    rounds = []
    for _ in range(ROUNDS):
        sent_ns = now()
        dist.send(message, rank)
        dist.recv(message, rank)
        remote_ns = int(message)  # waits for the device
        received_ns = now()
        ahead_ns = remote_ns - (sent_ns + received_ns) // 2
        rounds.append(ClockOffset(ahead_ns, (received_ns - sent_ns) // 2 + 1))
    return min(rounds, key=lambda offset: offset.error_ns)


def _serve_pings(mesh: Mesh, now: Callable[[], int]) -> None:
    """Answer each ping of rank 0 with this rank's time."""
    message = torch.zeros(1, dtype=torch.int64, device=mesh.device)
    for _ in range(ROUNDS):
        dist.recv(message, 0)
        message.fill_(now())
        dist.send(message, 0)
