"""All-to-all and all-gather over Gloo that fill a link in both directions at once.

Gloo tells a peer that it may send by a note on the connection that the data goes by. Who sends
first and receives then
has its note wait behind its data, and the peer waits for the note: one direction after the other,
on a link that could carry both (torch 2.13's own alltoall does so, its allgather for half of the
time).

      send, then receive    rank 0   data ▓▓▓▓▓▓▓▓▓ note          receive, then send    rank 0   note data ▓▓▓▓▓▓▓▓▓
                            rank 1                  data ▓▓▓▓▓▓▓▓                       rank 1   note data ▓▓▓▓▓▓▓▓▓

So all receives are begun before the first send. Everybody sends to the rank after it first, then to
the one after that, so that no rank is everybody's first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

TAG = 0x5A0A1  # apart from messages of whoever else uses the group


def all_to_all(gloo: Any, into: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
    """`into[r]` becomes rank r's row for this rank. Collective.

    Args:
        gloo: a process group whose messages are Gloo's, or such a backend of one.
        into, rows: a contiguous tensor for each rank of the group; empty ones are not sent.
    """
    rank, size = gloo.rank(), gloo.size()
    into[rank].copy_(rows[rank])
    sources = [(rank - step) % size for step in range(1, size)]
    targets = [(rank + step) % size for step in range(1, size)]
    works = [gloo.recv([into[source]], source, TAG) for source in sources if into[source].numel()]
    works += [gloo.send([rows[target]], target, TAG) for target in targets if rows[target].numel()]
    for work in works:
        work.wait()


def all_gather(gloo: Any, into: Sequence[Tensor], row: Tensor) -> None:
    """`into[r]` becomes rank r's `row`. Collective. Each rank sends as many bytes as in a ring."""
    all_to_all(gloo, into, [row] * gloo.size())
