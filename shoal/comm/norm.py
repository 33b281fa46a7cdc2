"""Norms of gradients of which some are sharded over ranks and some are replicated.

torch's `clip_grad_norm_` fails if some gradients are DTensors and some are not (pytorch#180346).
This one counts each entry of the full model's gradient once, on whichever ranks it lies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from shoal.platform.tensors import accumulation_dtype
from shoal.platform.torch_private.kernels import foreach_norm

_Placement = tuple[tuple[torch.distributed.ProcessGroup, ...], torch.device]


def to_local(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, or a plain tensor itself. It shares memory."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor, on every rank. Collective for a DTensor."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    placements = list(tensor.placements)
    with torch.no_grad():
        # One axis after the other: torch cannot gather shards of shards at once, and warns about
        # it.
        for axis in range(len(placements)):
            placements[axis] = Replicate()
            tensor = tensor.redistribute(placements=placements)
        return tensor.to_local()


def global_norm(tensors: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """Return the norm of all entries of all tensors, a scalar on this rank's device.

    The norm is that of Euclid for `norm_type` 2, and the largest absolute value for infinity. It is
    NaN or infinite if an entry is. A plain tensor counts once, as it is the same on every rank.
    Collective if there are DTensors. Shards that are offloaded lie on the CPU, and scalars beside
    them on the device; the norm is then on the device of the first tensor.
    """
    groups: dict[_Placement, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        local = to_local(tensor)
        groups[_sharded_over(tensor), local.device].append(local)
    is_largest = norm_type == torch.inf
    terms: list[Tensor] = []
    for (shard_groups, _), members in groups.items():
        filled = [t if t.numel() else t.new_zeros(1) for t in members]  # a shard may be empty
        norms = torch.stack(
            [norm.to(accumulation_dtype(norm.dtype)) for norm in foreach_norm(filled, norm_type)]
        )
        term = norms.amax() if is_largest else norms.square().sum()
        for group in shard_groups:
            if is_largest:
                op = torch.distributed.ReduceOp.MAX
                term = max_with_nan(term, partial(torch.distributed.all_reduce, op=op, group=group))
            else:
                torch.distributed.all_reduce(term, group=group)
        terms.append(term.to(terms[0].device) if terms else term)
    if not terms:
        return torch.zeros(())
    return torch.stack(terms).amax() if is_largest else torch.stack(terms).sum().sqrt()


def max_with_nan(value: Tensor, reduce_max: Callable[[Tensor], object]) -> Tensor:
    """Return the largest `value` of all ranks, a scalar; NaN where one has NaN. Collective.

    Args: reduce_max: takes the maximum in place, and may lose a NaN as comparisons do.
    """
    is_nan = value.isnan()
    pair = torch.stack((value.masked_fill(is_nan, 0.0), is_nan.to(value.dtype)))
    reduce_max(pair)
    return pair[0].masked_fill(pair[1] > 0, torch.nan)


def _sharded_over(tensor: Tensor) -> tuple[torch.distributed.ProcessGroup, ...]:
    """Return the groups over which `tensor` is sharded; none for a replicated tensor."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    return tuple(
        mesh.get_group(axis)
        for axis, placement in enumerate(tensor.placements)
        if not isinstance(placement, Replicate)
    )
