"""From what the ranks of an axis hold of a model to full tensors, by name, and back; copies of
tensors that share memory with others, which later steps write.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from shoal.comm.axis import Axis
from shoal.comm.norm import to_local
from shoal.platform.torch_private.fsdp import StridedShard

Named = TypeVar("Named", Tensor, Tensor | None)


def gather_named_tensors(
    axis: Axis | None, local: Mapping[str, Tensor | None]
) -> dict[str, Tensor | None]:
    """Return the tensors of all ranks, on each rank. If several ranks hold a name, the first wins.
    Collective.

    Args:
        axis: None for one rank.
        local: this rank's full tensors by full-model name. Tensors are sent one by one, so the
            extra memory is that of the result.
    """
    if axis is None or axis.size == 1:
        return dict(local)
    tensors: dict[str, Tensor | None] = {}
    held = {
        name: None if t is None else [str(t.dtype).removeprefix("torch."), list(t.shape)]
        for name, t in local.items()
    }
    for owner, held_there in enumerate(axis.all_gather_json(held)):
        for name, metadata in held_there.items():
            if name not in tensors:
                tensors[name] = _broadcast_from(axis, owner, local.get(name), metadata)
    return tensors


def gather_named_values(axis: Axis | None, local: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON values of all ranks by name; the first rank wins. Collective."""
    if axis is None or axis.size == 1:
        return dict(local)
    values: dict[str, Any] = {}
    for held in axis.all_gather_json(dict(local)):
        values = held | values
    return values


def _broadcast_from(axis: Axis, owner: int, local: Tensor | None, metadata: Any) -> Tensor | None:
    """Broadcast the owner's tensor, of which all ranks know dtype and shape. Collective."""
    if metadata is None:
        return None
    dtype, shape = metadata
    if axis.rank == owner:
        assert local is not None
        tensor = to_local(local).detach().to(axis.device).contiguous()
    else:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=axis.device)
    dist.broadcast(tensor, group=axis.group, group_src=owner)
    return tensor


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
    return as_shard(local, like)


def as_shard(local: Tensor, like: DTensor) -> DTensor:
    """Return this rank's values as a tensor of the full shape and layout of `like`, where they are.

    `from_local` moves them to the device of the mesh; offloaded ones lie on the CPU.
    """
    on_mesh = DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    return cast(DTensor, on_mesh.to(local.device))


def unshared(tensors: Mapping[str, Named], live: Iterable[Tensor]) -> dict[str, Named]:
    """Return the tensors, with copies of those that share memory with a tensor of `live`.

    Names of one and the same tensor, such as tied weights, get one copy.
    """
    storages = {_storage(tensor) for tensor in live if tensor.layout is torch.strided}
    copies: dict[tuple[object, ...], Tensor] = {}
    result: dict[str, Named] = {}
    for name, tensor in tensors.items():
        result[name] = tensor
        if tensor is None or (tensor.layout is torch.strided and _storage(tensor) not in storages):
            continue
        local = to_local(tensor)
        is_strided = local.layout is torch.strided
        start = local.data_ptr() if is_strided else id(tensor)
        key = (start, tensor.dtype, tensor.shape, local.shape)
        if key not in copies:
            copies[key] = tensor.detach().clone()
        result[name] = copies[key]
    return result


def _storage(tensor: Tensor) -> int:
    return to_local(tensor).untyped_storage().data_ptr()
