"""Which ranks share a host."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from shoal.comm.axis import Axis, new_group
from shoal.shm_backend.rendezvous import host_id

Hosts = tuple[tuple[int, ...], ...]
"""The ranks of each host, hosts in the order of their first ranks."""


def hosts_of(axis: Axis) -> tuple[Hosts, ...]:
    """For each line of the axis, its ranks by host, as numbers of the world. Collective over
    the world.
    """
    names = Axis(dist.get_rank(), dist.get_world_size(), axis.device).all_gather_str(host_id())
    return tuple(_by_host(line, names) for line in axis.all_groups or (tuple(range(len(names))),))


def group_inside(lines: Sequence[Hosts]) -> dist.ProcessGroup | None:
    """The ranks of this rank's line on its host, on the default backend; None where it is alone.
    Collective over the world."""
    group = new_group([ranks for hosts in lines for ranks in hosts])
    return group if dist.get_world_size(group) > 1 else None


def _by_host(line: Sequence[int], names: Sequence[str]) -> Hosts:
    found = dict.fromkeys(names[rank] for rank in line)
    return tuple(tuple(rank for rank in line if names[rank] == name) for name in found)
