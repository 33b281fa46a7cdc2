"""All-reduce in two layers: shared memory inside each host, and a ring of one leader for each host.

      host A   rank 0   a       [1] inside   a + b   ─┐  [2] a ring     S       [3] inside   S
               rank 1   b           ──────>            │     of leaders             ──────>   S
      host B   rank 2   c           reduce   c + d   ─┘     ──────>     S       broadcast    S
               rank 3   d                                                                    S

With k hosts a leader sends 2 (k - 1)/k M over its host's link, for any number of ranks on the host;
a ring of all ranks sends nearly as much, in more messages. This suits many ranks on hosts with one
link each. Inside a host with the backend "shoal", sums are in the order of ranks. From three hosts
on, their bits depend on the position in the tensor, as in a ring.

Source: the hierarchical all-reduce of Horovod (Sergeev and Del Balso, arXiv:1802.05799), with one
leader a host; BytePS (Jiang et al., OSDI 2020) layers machines in the same way."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from shoal.comm.algorithms import ring
from shoal.comm.algorithms.send_recv import PairwiseLink
from shoal.comm.axis import Axis, new_group
from shoal.platform.processes import host_id

Hosts = tuple[tuple[int, ...], ...]
"""The global ranks of each host; hosts in the order of their first ranks."""


def hosts_of(axis: Axis) -> tuple[Hosts, ...]:
    """Return the hosts of each group of the axis. Collective over the world."""
    world = Axis(dist.get_rank(), dist.get_world_size(), axis.device)
    host_ids = world.all_gather_str(host_id("pid"))
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


def all_reduce(
    tensor: Tensor, host_group: dist.ProcessGroup | None, leaders: PairwiseLink | None
) -> None:
    """Sum `tensor` (1-D, contiguous) over all ranks in place, with the same bits on each.
    Collective.

    Args:
        host_group: the ranks of this host, the first of which is the leader; None for one rank.
        leaders: the leaders of all hosts; None on other ranks.
    """
    if host_group is not None:
        dist.all_reduce(tensor, group=host_group)  # [1]
    if leaders is not None:
        ring.all_reduce(tensor, leaders)  # [2]
    if host_group is not None:
        dist.broadcast(tensor, group=host_group, group_src=0)  # [3]
