"""All-to-all and all-gather of flat tensors that hold a row for each rank, in the quickest way
that the group has.
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
    """Row r of `into` becomes rank r's row for this rank. Collective.

    Args: into, rows: contiguous, as many rows as ranks one after the other, all of one length.
    """
    if (carrier := _over_gloo(into, group)) is None:
        dist.all_to_all_single(into, rows, group=group)
    else:
        full_duplex.all_to_all(carrier, _split_rows(into, carrier), _split_rows(rows, carrier))


def all_gather(into: Tensor, row: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Row r of `into` becomes rank r's `row`. Collective. Args: into, row: contiguous, into as
    many rows as ranks.
    """
    if (carrier := _over_gloo(into, group)) is None:
        _all_gather(into, row, group=group)
    else:
        full_duplex.all_gather(carrier, _split_rows(into, carrier), row.detach().view(-1))


def _split_rows(whole: Tensor, group: dist.ProcessGroup) -> Sequence[Tensor]:
    return whole.detach().view(group.size(), whole.numel() // group.size()).unbind()


def _over_gloo(tensor: Tensor, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group, if it would send these numbers through Gloo."""
    group = group or dist.group.WORLD
    assert group is not None
    if isinstance(group, ShoalGroup):
        return None if group.on_one_host else group
    backend = backend_for(group, torch.device("cpu")) if tensor.is_cpu else None
    return group if isinstance(backend, dist.ProcessGroupGloo) else None
