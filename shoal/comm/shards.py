"""Shards of a tensor that every rank has in full. Without communication."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from shoal.platform.torch_private.fsdp import StridedShard


def shard_like(full: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard of `full`, laid out as `like` is; `full` itself for a plain `like`.

    Args: full: of the full shape of `like`, equal on all ranks.
    """
    if not isinstance(like, DTensor) or isinstance(full, DTensor):
        return full
    mesh = like.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank is not in the mesh of its parameter"
    # A strided shard is cut from what the plain shards of the same dimension leave.
    axes = sorted(
        range(mesh.ndim), key=lambda axis: isinstance(like.placements[axis], StridedShard)
    )
    local = full
    for axis in axes:
        placement = like.placements[axis]
        if isinstance(placement, (Shard, StridedShard)):
            chunks = torch.chunk(local, mesh.size(axis), placement.dim)
            index = coordinate[axis]
            empty = local.narrow(placement.dim, 0, 0)
            local = chunks[index] if index < len(chunks) else empty
    # A clone, so that the full tensor can be freed.
    local = local.detach().to(like.device).clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(
        local, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
