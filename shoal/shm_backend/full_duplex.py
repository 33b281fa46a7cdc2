"""All-to-all and all-gather over Gloo that use both directions of a network link at once.

Gloo tells a peer that it may send by a note on the same connection as the data. If a rank sends
first and receives then, its note waits behind its data, and the peer waits for the note. The data
then goes in one direction after the other, on a link that could carry both. (The alltoall of torch
2.13 itself does so, and its allgather does for half of the time.)

      send, then receive     rank 0   data ▓▓▓▓▓▓▓▓▓ note
                             rank 1                  data ▓▓▓▓▓▓▓▓

      receive, then send     rank 0   note data ▓▓▓▓▓▓▓▓▓
                             rank 1   note data ▓▓▓▓▓▓▓▓▓

So all receives start before the first send. Every rank sends to the next rank first, then to the
one after that, so that no rank is the first target of all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

TAG = 0x5A0A1  # other users of the group are unlikely to use this tag


def all_to_all(gloo: Any, into: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
    """Copy row s of rank r into row r of rank s's `into`. Collective.

    Args:
        gloo: a process group whose messages go through Gloo, or its Gloo backend.
        into, rows: a contiguous tensor for each rank of the group; empty ones are not sent.
    """
    rank, size = gloo.rank(), gloo.size()
    into[rank].copy_(rows[rank])
    sources = [(rank - step) % size for step in range(1, size)]
    targets = [(rank + step) % size for step in range(1, size)]
    works = [receive(gloo, into[source], source) for source in sources]
    works += [send(gloo, rows[target], target) for target in targets]
    for work in works:
        if work is not None:
            work.wait()


def all_gather(gloo: Any, into: Sequence[Tensor], row: Tensor) -> None:
    """Copy the `row` of rank r into row r of every rank's `into`. Collective.

    Each rank sends as many bytes as in a ring.
    """
    all_to_all(gloo, into, [row] * gloo.size())


def send(gloo: Any, tensor: Tensor, target: int) -> Any:
    """Start to send a contiguous tensor; return its handle, or None for an empty one."""
    return gloo.send([tensor], target, TAG) if tensor.numel() else None


def receive(gloo: Any, into: Tensor, source: int) -> Any:
    """Start to receive into a contiguous tensor; return its handle, or None for an empty one."""
    return gloo.recv([into], source, TAG) if into.numel() else None
