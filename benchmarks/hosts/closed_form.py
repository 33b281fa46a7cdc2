"""Seconds of an all-reduce over hosts, by closed form. Those of servers and of a ring beside
computing are `shoal.costs.server_count`.

M bytes, B bytes/s of every host's link in each direction. Source: Thakur et al., IJHPCA 2005."""

from __future__ import annotations

import math


def all_reduce(
    by: str, size_bytes: float, rate: float, hosts: int, ranks_per_host: int = 1
) -> float:
    """Seconds of an all-reduce over k hosts with one link each, without what the messages' number
    costs.

    ring 2 (n-1)/n M/B over all n ranks; tree 2 ceil(log2 n) M/B; hierarchical 2 (k-1)/k M/B.
    Nothing where there is one host."""
    ranks, link_s = hosts * ranks_per_host, size_bytes / rate
    if hosts == 1:
        return 0.0
    return (
        link_s
        * {
            "ring": 2 * (ranks - 1) / ranks,
            "tree": 2 * math.ceil(math.log2(ranks)),
            "hierarchical": 2 * (hosts - 1) / hosts,
        }[by]
    )
