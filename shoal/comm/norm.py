"""Norms of gradients that are whole on some ranks and in shards on others.

torch's `clip_grad_norm_` fails where some gradients are DTensors and some are not (pytorch#180346),
so this is ours: each entry of the model's gradient counts once, wherever it lies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from shoal.platform.tensors import accumulation_dtype
from shoal.platform.torch_private.kernels import foreach_norm


def to_local(tensor: Tensor) -> Tensor:
    """What this rank holds of `tensor`; writing into it writes into `tensor`."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """All of `tensor`, on every rank. Collective for a DTensor."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    placements = list(tensor.placements)
    with torch.no_grad():
        # One axis after the other: shards of shards cannot be gathered at once, and torch warns
        # that it does not.
        for axis in range(len(placements)):
            placements[axis] = Replicate()
            tensor = tensor.redistribute(placements=placements)
        return tensor.to_local()


def global_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The 2-norm of all entries of all tensors, a scalar on this rank's device: NaN or infinite if
    an entry is.

    Collective where there are DTensors. A plain tensor counts once: it is the same on every rank.
    """
    groups: dict[tuple[torch.distributed.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups[_sharded_over(tensor)].append(to_local(tensor))
    squares = []
    for over, members in groups.items():
        norms = foreach_norm(members)
        square = (
            torch.stack([norm.to(accumulation_dtype(norm.dtype)) for norm in norms]).square().sum()
        )
        for group in over:
            torch.distributed.all_reduce(square, group=group)
        squares.append(square)
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())


def _sharded_over(tensor: Tensor) -> tuple[torch.distributed.ProcessGroup, ...]:
    """The groups over which shards of `tensor` make up the whole; none for a tensor that is
    whole on every rank.
    """
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    return tuple(
        mesh.get_group(axis)
        for axis, placement in enumerate(tensor.placements)
        if not isinstance(placement, Replicate)
    )
