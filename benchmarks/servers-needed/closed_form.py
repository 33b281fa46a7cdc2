"""Seconds of a step by closed form, and how many servers are enough.

M bytes of gradients and as many of values, m workers, n servers that do nothing else, B bytes/s of every host's link in
each direction, C parts on each server. Time to compute is t, a third of it forward.

Sources: Li et al., OSDI 2014, and Jiang et al., OSDI 2020 (servers); Patarasuk and Yuan, JPDC 2009 (the ring).
"""

from __future__ import annotations

import math

FORWARD = 1 / 3


def one_way(size_bytes: float, rate: float, workers: int, servers: int) -> float:
    """Pushing everything, or pulling it: U = max(M/B, mM/(nB))."""
    return max(size_bytes / rate, workers * size_bytes / (servers * rate))


def servers_beside(
    size_bytes: float, rate: float, workers: int, servers: int, parts: float, compute_s: float = 0.0
) -> float:
    """A part is pushed beside the backward pass, and pulled while others are pushed, or beside the forward pass.

    Where pushing is the limit max(t_b, U) + U/C + t_f, else t_b + max(t_f, U) + min(t_f, U)/C; without compute U + U/C.
    """
    forward_s, backward_s = FORWARD * compute_s, (1 - FORWARD) * compute_s
    way_s = one_way(size_bytes, rate, workers, servers)
    pushing = max(backward_s, way_s) + way_s / parts + forward_s
    pulling = backward_s + max(forward_s, way_s) + min(forward_s, way_s) / parts
    return max(pushing, pulling)


def ring_beside(size_bytes: float, rate: float, workers: int, parts: float, compute_s: float = 0.0) -> float:
    """All-reduce beside the backward pass, A = 2 (m-1)/m M/B: t_f + max(t_b + A/P, t_b/P + A), with P buckets."""
    forward_s, backward_s = FORWARD * compute_s, (1 - FORWARD) * compute_s
    reduce_s = 2 * (workers - 1) / workers * size_bytes / rate
    return forward_s + max(backward_s + reduce_s / parts, backward_s / parts + reduce_s)


def saturation(workers: int, worker_rate: float, server_rate: float) -> int:
    """How many servers take what the workers can send, so that one more buys nothing: m B_w / B_s, rounded up."""
    return math.ceil(workers * worker_rate / server_rate)


def ring_is_beaten_by(workers: int, parts: int, efficiency: float) -> int | None:
    """The fewest servers that exchange faster than a ring, which uses its links to the full; None where none do."""
    for servers in range(1, workers + 1):
        if servers_beside(1, 1, workers, servers, parts / servers) / efficiency < ring_beside(1, 1, workers, parts):
            return servers
    return None
