"""How many parameter servers: the closed form, with its assumptions.

M bytes of gradients and as many of values; m workers, n servers on hosts that do nothing else; B
bytes/s of every host's link in each direction, of which each of w workers of a host has B/w; beta
bytes/s that a server sums and steps; C parts on each server. A step computes t seconds, a third of
them forward.

      push, or pull    U = max(w M/B, m M / (n min(B, beta)))
      servers          U + U/C                      parts are pulled while others are pushed
      ring             2 (m-1)/m M/B                each link carries nearly twice M, one way

      saturation       n* = ceil(m B / (w min(B, beta)))     one server more buys nothing
      beats a ring     n > m^2 / (2 eta (m-1))               w = 1, beta >= B; eta: share of the
                                                             links that is used
      fully hidden     ceil(m M / (min(B, beta) t))          t seconds of computing hide one way

Assumptions: workers of one pace, links of one speed, servers on hosts of their own, parts of equal
size. Where servers share hosts with workers, an exchange moves 2 (m-1) M / (m B): a ring's time.

Sources: Li et al., OSDI 2014, and Jiang et al., OSDI 2020 (servers); Patarasuk and Yuan, JPDC 2009
(the ring). `benchmarks/servers-needed` measures them.
"""

from __future__ import annotations

import math

FORWARD = 1 / 3
"""Share of the computing that is the forward pass."""


def one_way(
    size_bytes: float, rate: float, workers: int, servers: int, server_rate: float = 0.0
) -> float:
    """Return the seconds of pushing everything, or of pulling it.

    Args:
        rate: bytes/s of a worker.
        server_rate: bytes/s of a server; 0 for the rate of a worker.
    """
    return max(size_bytes / rate, workers * size_bytes / (servers * (server_rate or rate)))


def servers_beside(
    size_bytes: float,
    rate: float,
    workers: int,
    servers: int,
    parts: float,
    compute_s: float = 0.0,
    server_rate: float = 0.0,
) -> float:
    """Return the seconds of a step with servers.

    A part is pushed beside the backward pass, and pulled while others are pushed, or beside the
    forward pass. Where pushing is the limit max(t_b, U) + U/C + t_f, else t_b + max(t_f, U) +
    min(t_f, U)/C; without compute U + U/C.

    Args: rate, server_rate: as for `one_way`.
    """
    forward_s, backward_s = FORWARD * compute_s, (1 - FORWARD) * compute_s
    way_s = one_way(size_bytes, rate, workers, servers, server_rate)
    pushing = max(backward_s, way_s) + way_s / parts + forward_s
    pulling = backward_s + max(forward_s, way_s) + min(forward_s, way_s) / parts
    return max(pushing, pulling)


def ring_beside(
    size_bytes: float, rate: float, workers: int, parts: float, compute_s: float = 0.0
) -> float:
    """Return the seconds of a step with a ring all-reduce of A = 2 (m-1)/m M/B."""
    return reduced_beside(2 * (workers - 1) / workers * size_bytes / rate, parts, compute_s)


def reduced_beside(reduce_s: float, parts: float, compute_s: float = 0.0) -> float:
    """Return the seconds of a step with an all-reduce of A seconds beside the backward pass.

    t_f + max(t_b + A/P, t_b/P + A), with P buckets.
    """
    forward_s, backward_s = FORWARD * compute_s, (1 - FORWARD) * compute_s
    return forward_s + max(backward_s + reduce_s / parts, backward_s / parts + reduce_s)


def saturation(workers: int, worker_rate: float, server_rate: float) -> int:
    """Return how many servers take what the workers can send: m B_w / B_s, rounded up."""
    return math.ceil(workers * worker_rate / server_rate)


def hidden_from(
    size_bytes: float, rate: float, workers: int, compute_s: float, server_rate: float = 0.0
) -> int | None:
    """Return how many servers hide an exchange behind the computing; None if no number does.

    Pushing must fit into the backward pass, pulling into the forward pass, which is shorter.

    Args: rate, server_rate: as for `one_way`.
    """
    window_s = min(FORWARD, 1 - FORWARD) * compute_s
    if size_bytes / rate > window_s:
        return None  # a worker's own link takes longer
    return max(1, math.ceil(workers * size_bytes / ((server_rate or rate) * window_s)))
