"""The note of buffers that a training forward pass writes from this rank's samples.

Codebooks, queues and moving averages are computed from a batch. Where each rank, or each
micro-batch, has another part of it, their values are not those of one device. BatchNorm has a note
of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shoal.comm.mesh import Mesh
from shoal.strategies.buffer_versions import changed_since, mutable_buffers, snapshot

WRITES = "pass writes these buffers from the samples of one rank"
"""Words of the note by which it is known."""


@contextmanager
def noting_buffers(
    module: nn.Module, mesh: Mesh, divided: bool, announce: Callable[[str], None]
) -> Iterator[None]:
    """Announce buffers that the block writes and that differ between ranks. Collective.

    Args:
        module: the prepared model, or the group of them.
        divided: a batch is divided into micro-batches, so buffers that are equal on all ranks may
            differ from one device's too.
    """
    before = snapshot(module)
    yield
    changes = changed_since(module, before)
    buffers = mutable_buffers(module)
    names = [name for name in buffers if changes[name] and buffers[name].is_floating_point()]
    flags = torch.tensor([name in names for name in buffers], dtype=torch.float64)
    if not len(buffers) or not bool(mesh.data.all_reduce(flags.to(mesh.device)).sum()):
        return
    sums = torch.stack([_checksum(buffer) for buffer in buffers.values()]).to(mesh.device)
    largest, negated_smallest = mesh.data.all_reduce_max(torch.stack((sums, -sums)))
    differs = (largest + negated_smallest > 0).tolist()
    apart = [
        name.removeprefix(".")
        for name, differ in zip(buffers, differs, strict=True)
        if differ or (divided and name in names)
    ]
    if apart:
        announce(
            f"note: {', '.join(apart[:3])}{' and others' if len(apart) > 3 else ''}: a forward "
            f"{WRITES} or micro-batch, so they are not those of one device. Compute them from "
            "run.gather(...), if they must be."
        )


def _checksum(buffer: Tensor) -> Tensor:
    """Return a number that differs where values differ, nearly always; 0 for other dtypes."""
    if not buffer.is_floating_point() or not buffer.numel():
        return torch.zeros((), dtype=torch.float64)
    return torch.nan_to_num(buffer.detach().double()).sum().cpu()
