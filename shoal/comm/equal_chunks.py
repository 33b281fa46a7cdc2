"""All-to-all and all-gather of flat tensors with one row for each rank.

Over Gloo both are messages that use both directions of a link at once. Gloo tells a peer that it
may send by a note on the same connection as the data. If a rank sends first, its note waits behind
its data, and the peer waits for the note. (The alltoall of torch 2.13 itself does so, and its
allgather does for half of the time.)

      send, then receive     rank 0   data ▓▓▓▓▓▓▓▓▓ note
                             rank 1                  data ▓▓▓▓▓▓▓▓

      receive, then send     rank 0   note data ▓▓▓▓▓▓▓▓▓
                             rank 1   note data ▓▓▓▓▓▓▓▓▓

So all receives start before the first send. Every rank sends to the next rank first, then to the
one after that, so that no rank is the first target of all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.platform.torch_private.c10d import backend_for
from shoal.shm_backend.group import ShoalGroup

TAG = 0x5A0A1  # other users of the group are unlikely to use this tag
# torch 2.13 renamed both, and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_to_all(into: Tensor, rows: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Copy row s of rank r's `rows` into row r of rank s's `into`. Collective.

    Args: into, rows: contiguous; as many rows of equal length as there are ranks.
    """
    if (gloo := gloo_group(into, group)) is None:
        dist.all_to_all_single(into, rows, group=group)
    else:
        _exchange(gloo, _split_rows(into, gloo), _split_rows(rows, gloo))


def all_gather(into: Tensor, row: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Copy the `row` of rank r into row r of every rank's `into`. Collective.

    Args: into, row: contiguous; `into` has as many rows as there are ranks.
    """
    if (gloo := gloo_group(into, group)) is None:
        _all_gather(into, row, group=group)
    else:
        _exchange(gloo, _split_rows(into, gloo), [row.detach().view(-1)] * gloo.size())


def _exchange(gloo: dist.ProcessGroup, into: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
    """Send row r to rank r, and receive its row into `into[r]`; empty rows are not sent."""
    rank, size = gloo.rank(), gloo.size()
    into[rank].copy_(rows[rank])
    sources = [(rank - step) % size for step in range(1, size)]
    targets = [(rank + step) % size for step in range(1, size)]
    works = [receive(gloo, into[source], source) for source in sources]
    works += [send(gloo, rows[target], target) for target in targets]
    for work in works:
        if work is not None:
            work.wait()


def _split_rows(tensor: Tensor, group: dist.ProcessGroup) -> Sequence[Tensor]:
    return tensor.detach().view(group.size(), tensor.numel() // group.size()).unbind()


def send(gloo: Any, tensor: Tensor, target: int) -> Any:
    """Start to send a contiguous tensor; return its handle, or None for an empty one."""
    return gloo.send([tensor], target, TAG) if tensor.numel() else None


def receive(gloo: Any, into: Tensor, source: int) -> Any:
    """Start to receive into a contiguous tensor; return its handle, or None for an empty one."""
    return gloo.recv([into], source, TAG) if into.numel() else None


def gloo_group(tensor: Tensor, group: dist.ProcessGroup | None = None) -> dist.ProcessGroup | None:
    """Return the group if it would send this tensor through Gloo, else None."""
    group = group or dist.group.WORLD
    assert group is not None
    if isinstance(group, ShoalGroup):
        return None if group.uses_shared_memory else group
    backend = backend_for(group, torch.device("cpu")) if tensor.is_cpu else None
    return group if isinstance(backend, dist.ProcessGroupGloo) else None
