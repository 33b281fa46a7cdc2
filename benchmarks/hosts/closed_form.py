"""Seconds of a step by closed form, and how many servers are enough.

M bytes of gradients and as many of values, m workers, n servers that do nothing else, B bytes/s of
every host's link in each direction, C parts on each server. Time to compute is t, a third of it
forward.

Sources: Li et al., OSDI 2014, and Jiang et al., OSDI 2020 (servers); Patarasuk and Yuan, JPDC 2009
(the ring); Thakur et al., IJHPCA 2005 (the others)."""

from __future__ import annotations

import math

FORWARD = 1 / 3


def one_way(size_bytes: float, rate: float, workers: int, servers: int) -> float:
    """Pushing everything, or pulling it: U = max(M/B, mM/(nB))."""
    return max(size_bytes / rate, workers * size_bytes / (servers * rate))


def servers_beside(
    size_bytes: float, rate: float, workers: int, servers: int, parts: float, compute_s: float = 0.0
) -> float:
    """A part is pushed beside the backward pass, and pulled while others are pushed, or beside the
    forward pass.

    Where pushing is the limit max(t_b, U) + U/C + t_f, else t_b + max(t_f, U) + min(t_f, U)/C;
    without compute U + U/C."""
    forward_s, backward_s = FORWARD * compute_s, (1 - FORWARD) * compute_s
    way_s = one_way(size_bytes, rate, workers, servers)
    pushing = max(backward_s, way_s) + way_s / parts + forward_s
    pulling = backward_s + max(forward_s, way_s) + min(forward_s, way_s) / parts
    return max(pushing, pulling)


def ring_beside(
    size_bytes: float, rate: float, workers: int, parts: float, compute_s: float = 0.0
) -> float:
    """A step with a ring all-reduce of A = 2 (m-1)/m M/B."""
    return reduced_beside(2 * (workers - 1) / workers * size_bytes / rate, parts, compute_s)


def reduced_beside(reduce_s: float, parts: float, compute_s: float = 0.0) -> float:
    """All-reduce of A seconds beside the backward pass: t_f + max(t_b + A/P, t_b/P + A), with P
    buckets.
    """
    forward_s, backward_s = FORWARD * compute_s, (1 - FORWARD) * compute_s
    return forward_s + max(backward_s + reduce_s / parts, backward_s / parts + reduce_s)


def all_reduce(
    by: str, size_bytes: float, rate: float, hosts: int, ranks_per_host: int = 1
) -> float:
    """Seconds of an all-reduce over k hosts with one link each, without what the messages' number
    costs.

    ring 2 (n-1)/n M/B over all n ranks; tree 2 ceil(log2 n) M/B; halving-doubling 2 (p-1)/p M/B
    with p the largest power of two, and 2 M/B more where that is not n; hierarchical 2 (k-1)/k M/B.
    Nothing where there is one host."""
    ranks, link_s = hosts * ranks_per_host, size_bytes / rate
    if hosts == 1:
        return 0.0
    power = 1 << (ranks.bit_length() - 1)
    return (
        link_s
        * {
            "ring": 2 * (ranks - 1) / ranks,
            "tree": 2 * math.ceil(math.log2(ranks)),
            "halving-doubling": 2 * (power - 1) / power + 2 * (power < ranks),
            "hierarchical": 2 * (hosts - 1) / hosts,
        }[by]
    )


def saturation(workers: int, worker_rate: float, server_rate: float) -> int:
    """How many servers take what the workers can send, so that one more buys nothing: m B_w /
    B_s, rounded up.
    """
    return math.ceil(workers * worker_rate / server_rate)


def ring_is_beaten_by(workers: int, parts: int, efficiency: float) -> int | None:
    """The fewest servers that exchange faster than a ring, which uses its links to the full;
    None where none do.
    """
    for servers in range(1, workers + 1):
        if servers_beside(1, 1, workers, servers, parts / servers) / efficiency < ring_beside(
            1, 1, workers, parts
        ):
            return servers
    return None
