"""The ranks of an axis by host."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from shoal.comm.axis import Axis, new_group
from shoal.shm_backend.rendezvous import host_id

Hosts = tuple[tuple[int, ...], ...]
"""The global ranks of each host; hosts in the order of their first ranks."""


def hosts_of(axis: Axis) -> tuple[Hosts, ...]:
    """Return the hosts of each group of the axis. Collective over the world."""
    world = Axis(dist.get_rank(), dist.get_world_size(), axis.device)
    host_ids = world.all_gather_str(host_id())
    all_groups = axis.all_groups or (tuple(range(world.size)),)
    return tuple(_ranks_by_host(group, host_ids) for group in all_groups)


def new_host_group(hosts_of_groups: Sequence[Hosts]) -> dist.ProcessGroup | None:
    """Make a group of the ranks of this rank's group on its host. Collective over the world.

    Returns: None if this rank is the only one.
    """
    group = new_group([ranks for hosts in hosts_of_groups for ranks in hosts])
    return group if dist.get_world_size(group) > 1 else None


def _ranks_by_host(group: Sequence[int], host_ids: Sequence[str]) -> Hosts:
    hosts: dict[str, list[int]] = {}
    for rank in group:
        hosts.setdefault(host_ids[rank], []).append(rank)
    return tuple(tuple(ranks) for ranks in hosts.values())
