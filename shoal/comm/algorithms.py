"""Algorithms of all-reduce, made of messages between two ranks alone.

    M bytes, n ranks    messages in sequence   sent by the busiest rank   bits depend on position
    ring                2 (n - 1)              2 (n - 1)/n M              from 3 ranks on
    tree                2 log2(n)              log2(n) M                  no
    hierarchical        shared memory inside hosts,                       from 3 hosts on
                        a ring of the hosts' leaders

With every algorithm, all ranks end with the same bits: each element is summed on one rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp

from shoal.comm.axis import Axis, new_group
from shoal.platform.processes import host_id


class PairwiseLink:
    """Messages between the members of a group. Members are numbered from 0.

    Args:
        group: used by one thread only. None for all ranks of the world.
        members: ranks of the group that take part, in the order of their numbers; empty for all.

    Attributes:
        rank, size: the number of this member, and the number of members.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, members: Sequence[int] = ()) -> None:
        self._group = group
        self._members = list(members) or list(range(dist.get_world_size(group)))
        self.rank, self.size = self._members.index(dist.get_rank(group)), len(self._members)

    def exchange(
        self, send: tuple[Tensor, int] | None = None, receive: tuple[Tensor, int] | None = None
    ) -> None:
        """Send and receive at the same time, so that ranks in a circle do not deadlock.

        Returns when the tensors may be changed. An empty tensor is no message. The receive starts
        first: otherwise Gloo would use one direction of a link after the other
        (shoal/comm/equal_chunks.py).

        Args: send: tensor, and the member that gets it. receive: where to, and from which member.

        Raises:
            RuntimeError: the other rank has ended, has given up or is late by the group's time-out.
                A group of backend "shoal" says which one it is.
        """
        messages = [
            P2POp(function, message[0], group=self._group, group_peer=self._members[message[1]])
            for function, message in ((dist.irecv, receive), (dist.isend, send))
            if message is not None and message[0].numel()
        ]
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()


def ring(tensor: Tensor, pairs: PairwiseLink) -> None:
    """Sum `tensor` (1-D, contiguous) over all ranks in place, with the same bits on each.

    Every rank sends to its right neighbour only, and all links stay busy. The tensor has as many
    pieces as there are ranks, and each piece goes round the ring twice. Three ranks; the right
    neighbour of rank 2 is rank 0, and a capital is the sum over all ranks:

                      rank 0            rank 1            rank 2
                      a0  b0  c0        a1  b1  c1        a2  b2  c2
        [1] reduce-   a0 ───────────>   b1 ───────────>   c2 ───────────>
            scatter   a0  b0  c20       a01 b1  c1        a2  b12 c2
                      c20 ──────────>   a01 ──────────>   b12 ──────────>
                      a0  B   c20       a01 b1  C         A   b12 c2
        [2] all-      B ────────────>   C ────────────>   A ────────────>
            gather    A   B   c20       a01 B   C         A   b12 C
                      A ────────────>   B ────────────>   C ────────────>
                      A   B   C         A   B   C         A   B   C

    2 (n - 1) messages of M/n bytes in sequence; each rank sends 2 (n - 1)/n M, the least possible,
    so the ring suits large tensors. Piece i is summed from rank i on around the ring: from three
    ranks on, the bits of a sum depend on the element's position in the tensor. Collective.

    Source: Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of
    Workstations, JPDC 69(2), 2009.
    """
    rank, size = pairs.rank, pairs.size
    left, right = (rank - 1) % size, (rank + 1) % size
    pieces = tensor.tensor_split(size)
    arrived = torch.empty_like(pieces[0])  # the longest piece
    for step in range(size - 1):  # [1]
        partial_sum = pieces[(rank - step - 1) % size]
        into = arrived[: len(partial_sum)]
        pairs.exchange((pieces[(rank - step) % size], right), (into, left))
        partial_sum += into
    for step in range(size - 1):  # [2]
        sent, into = pieces[(rank - step + 1) % size], pieces[(rank - step) % size]
        pairs.exchange((sent, right), (into, left))


def tree(tensor: Tensor, pairs: PairwiseLink) -> None:
    """Sum `tensor` (1-D, contiguous) over all ranks in place, with the same bits on each.

    Sums go up a binomial tree to rank 0, and the total comes down on the same edges.

        rank        0     1     2     3     4     5           six ranks
        [1] up      <──── 1     <──── 3     <──── 5           a rank sends once in this phase
                    <────────── 23
                    <────────────────────── 45
        [2] down    ──────────────────────> A                 the same edges in reverse order
                    ──────────> A
                    ────> A     ────> A     ────> A

    2 log2(n) messages in sequence, rounded up, each of all M bytes: few messages, so the tree suits
    small tensors. Rank 0 sends and receives log2(n) M. Every element is summed in the same pairs of
    ranks, at every position in the tensor. Collective.

    Source: the binomial tree of Thakur, Rabenseifner and Gropp, Optimization of Collective
    Communication Operations in MPICH, IJHPCA 19(1), 2005. Two trees at once use all links (Sanders,
    Speck and Träff, Two-tree algorithms for full bandwidth broadcast, reduction and scan, Parallel
    Computing 35(12), 2009); this is one.
    """
    rank, size = pairs.rank, pairs.size
    arrived = torch.empty_like(tensor)
    distance = 1
    while distance < size and not rank & distance:  # [1]
        if rank + distance < size:
            pairs.exchange(receive=(arrived, rank + distance))
            tensor += arrived
        distance *= 2
    if rank:
        pairs.exchange(send=(tensor, rank - distance))
        pairs.exchange(receive=(tensor, rank - distance))  # [2]
    while distance > 1:
        distance //= 2
        if rank + distance < size:
            pairs.exchange(send=(tensor, rank + distance))


Hosts = tuple[tuple[int, ...], ...]
"""The global ranks of each host; hosts in the order of their first ranks."""


def hosts_of(axis: Axis) -> tuple[Hosts, ...]:
    """Return the hosts of each group of the axis. Collective over the world."""
    world = Axis(dist.get_rank(), dist.get_world_size(), axis.device)
    host_ids = world.all_gather_str(host_id("pid"))
    hosts: list[dict[str, list[int]]] = []  # of each group
    for group in axis.all_groups or (range(world.size),):
        hosts.append({})
        for rank in group:
            hosts[-1].setdefault(host_ids[rank], []).append(rank)
    return tuple(tuple(map(tuple, of_group.values())) for of_group in hosts)


def new_host_group(hosts_of_groups: Sequence[Hosts]) -> dist.ProcessGroup | None:
    """Make a group of the ranks of this rank's group on its host. Collective over the world.

    Returns: None if this rank is the only one.
    """
    group = new_group([ranks for hosts in hosts_of_groups for ranks in hosts])
    return group if dist.get_world_size(group) > 1 else None


def hierarchical(
    tensor: Tensor, host_group: dist.ProcessGroup | None, leaders: PairwiseLink | None
) -> None:
    """Sum `tensor` (1-D, contiguous) over all ranks in place, with the same bits on each.

    Two layers: shared memory inside each host, and a ring of one leader for each host.

        host A   rank 0   a       [1] inside   a + b   ─┐  [2] a ring     S       [3] inside   S
                 rank 1   b           ──────>            │     of leaders             ──────>   S
        host B   rank 2   c           reduce   c + d   ─┘     ──────>     S       broadcast    S
                 rank 3   d                                                                    S

    With k hosts a leader sends 2 (k - 1)/k M over its host's link, for any number of ranks on the
    host; a ring of all ranks sends nearly as much, in more messages. This suits many ranks on hosts
    with one link each. Inside a host with the backend "shoal", sums are in the order of ranks. From
    three hosts on, their bits depend on the position in the tensor, as in a ring. Collective.

    Source: the hierarchical all-reduce of Horovod (Sergeev and Del Balso, arXiv:1802.05799), with
    one leader a host; BytePS (Jiang et al., OSDI 2020) layers machines in the same way.

    Args:
        host_group: the ranks of this host, the first of which is the leader; None for one rank.
        leaders: the leaders of all hosts; None on other ranks.
    """
    if host_group is not None:
        dist.all_reduce(tensor, group=host_group)  # [1]
    if leaders is not None:
        ring(tensor, leaders)  # [2]
    if host_group is not None:
        dist.broadcast(tensor, group=host_group, group_src=0)  # [3]
