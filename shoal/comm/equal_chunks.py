"""All-to-all and all-gather of flat tensors with one row for each rank.

On a group whose messages go through Gloo, `full_duplex.py` is faster than Gloo's own collectives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.platform.torch_private.c10d import backend_for
from shoal.shm_backend import full_duplex
from shoal.shm_backend.group import ShoalGroup

# torch 2.13 renamed it, and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_to_all(into: Tensor, rows: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Copy row s of rank r's `rows` into row r of rank s's `into`. Collective.

    Args: into, rows: contiguous; as many rows of equal length as there are ranks.
    """
    if (gloo := gloo_group(into, group)) is None:
        dist.all_to_all_single(into, rows, group=group)
    else:
        full_duplex.all_to_all(gloo, _split_rows(into, gloo), _split_rows(rows, gloo))


def all_gather(into: Tensor, row: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Copy the `row` of rank r into row r of every rank's `into`. Collective.

    Args: into, row: contiguous; `into` has as many rows as there are ranks.
    """
    if (gloo := gloo_group(into, group)) is None:
        _all_gather(into, row, group=group)
    else:
        full_duplex.all_gather(gloo, _split_rows(into, gloo), row.detach().view(-1))


def _split_rows(tensor: Tensor, group: dist.ProcessGroup) -> Sequence[Tensor]:
    return tensor.detach().view(group.size(), tensor.numel() // group.size()).unbind()


def gloo_group(tensor: Tensor, group: dist.ProcessGroup | None = None) -> dist.ProcessGroup | None:
    """Return the group if it would send this tensor through Gloo, else None."""
    group = group or dist.group.WORLD
    assert group is not None
    if isinstance(group, ShoalGroup):
        return None if group.on_one_host else group
    backend = backend_for(group, torch.device("cpu")) if tensor.is_cpu else None
    return group if isinstance(backend, dist.ProcessGroupGloo) else None
