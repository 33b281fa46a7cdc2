"""A check, before the first step, that the snapshots of a run fit into the memory of its hosts."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from shoal.comm.mesh import Mesh
from shoal.errors import ConfigError
from shoal.train.checkpoint.host_disks import HostDisks

AT_ONCE = 2
"""Snapshots that lie in memory while one is written."""


def check_room(
    parameters: Iterable[Tensor], memories: HostDisks, mesh: Mesh, directory: Path
) -> None:
    """Check that there is room for the weights of all snapshots. Collective.

    What an optimizer keeps is not known before its first step, so more may be needed.

    Args:
        parameters: of this rank, divided among ranks or not.
        memories: of the ranks' hosts.
        directory: of this rank's host.

    Raises:
        ConfigError: on every rank, with both numbers, if a host has too little.
    """
    # A tensor that is cut into plain tensors counts on all of its ranks, one that all have once.
    own_bytes = sum(tensor.numel() * tensor.element_size() for tensor in parameters) / mesh.size
    free_bytes = shutil.disk_usage(directory).free
    problem = ""
    if memories.is_first(mesh.rank):
        memory = memories.of_rank[mesh.rank]
        problem = room_problem(own_bytes, memories, memory, free_bytes)
    if problems := [found for found in mesh.all_gather_str(problem) if found]:
        raise ConfigError(problems)


def room_problem(bytes_of_rank: float, memories: HostDisks, memory: int, free_bytes: int) -> str:
    """Return a sentence if the weights in the snapshots of one host need more than it has.

    Args:
        bytes_of_rank: in the file of each rank.
        memory: number of the host among `memories`.
    """
    ranks = range(len(memories.of_rank))
    files = sum(memory in memories.holders(rank) for rank in ranks)
    needed_bytes = int(AT_ONCE * files * bytes_of_rank)
    if needed_bytes <= free_bytes:
        return ""
    needed, free = f"{needed_bytes / 2**20:,.0f} MiB", f"{free_bytes / 2**20:,.0f} MiB"
    first = memories.first_rank(memory)
    return (
        f"snapshot.every: on the host of rank {first}, two snapshots of {files} ranks' parts need "
        f"{needed} of /dev/shm for the weights alone, and {free} are free. Give it more (docker "
        f"run --shm-size={2 * needed_bytes >> 20}m, mount -o remount,size=...), use fewer "
        "--snapshot.copies, or --snapshot.every none."
    )
