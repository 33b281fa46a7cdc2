"""Tensors of all ranks as the one tensor of one process: outputs of modules and their gradients.

    data ranks       rows 0 1 2 | rows 3 4            joined along the batch, in order of ranks
    time first       t0r0 t1r0 | t0r1 t1r1            joined within each time
    micro-batches    rows 0 1 | row 2                 joined in the order of calls or ranks
    tensor ranks     columns 0-3 | columns 4-7        joined where their sizes add up
    fused layers     q0 k0 v0 | q1 k1 v1              query, key and value joined one by one

One process says which shape comes of it; a tensor that cannot have that shape is not compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from math import gcd, inf, isnan

import torch
from torch import Tensor

FUSED = (2, 3)
"""Numbers of equal matrices that a layer may hold in one: gate and up; query, key and value."""
SAME_ORDER = 1e-6
"""Relative distance below which no other order of rows is tried."""
Pieces = list[list[Tensor]]
"""For each data rank the tensors of its micro-batches."""


def versions(groups: list[Pieces], like: Tensor, has_stand_ins: bool) -> list[Tensor]:
    """Return what the pieces of each tensor rank give, as tensors of the shape of `like`.

    Several where ranks hold copies of it; none if unknown.

    Args: has_stand_ins: ranks without rows of their own have computed one of another rank.
    """
    for dim in range(min(2, like.dim())):
        joined = [along(dim, [*chain.from_iterable(group)]) for group in groups]
        found = [tensor for tensor in joined if tensor is not None]
        if not found or len(found) < len(groups):  # the pieces of one do not fit
            continue
        cut = [_without_stand_ins(t, like, dim) for t in found] if has_stand_ins else found
        if all(tensor.shape == like.shape for tensor in cut):
            pairs = zip(cut, groups, strict=True)
            return [_in_order(tensor, group, dim, like) for tensor, group in pairs]
        whole = _columns(cut, like)
        if whole is not None:
            return [whole]
    copies = [part for group in groups for part in chain.from_iterable(group)]
    return copies if copies and all(part.shape == like.shape for part in copies) else []


def _in_order(joined: Tensor, group: Pieces, dim: int, like: Tensor) -> Tensor:
    """Return the joined rows in the order of one process, where the batch is not outermost.

    A model that puts time first and then flattens both gives rows (time, sample). As for columns,
    the order that comes nearest counts.
    """
    parts = [*chain.from_iterable(group)]
    if len(parts) < 2 or distance(joined, like) <= SAME_ORDER * float(like.norm()):
        return joined
    outer = gcd(*(part.shape[dim] for part in parts))
    return _nearest(joined, parts, dim, range(2, outer + 1), like)


def _nearest(
    joined: Tensor, parts: list[Tensor], dim: int, counts: Iterable[int], like: Tensor
) -> Tensor:
    """Return parts in the order that comes nearest to one process: as they are, or block by block.

    Args:
        joined: the parts as they are.
        counts: numbers of blocks, each part having a share of each: times, or matrices.
    """
    orders = [joined]
    for count in counts:
        if not any(part.shape[dim] % count for part in parts):
            blocks = zip(*(part.chunk(count, dim) for part in parts), strict=True)
            order = torch.cat([*chain.from_iterable(blocks)], dim)
            orders += [order] if order.shape == like.shape else []
    return min(orders, key=lambda order: distance(order, like))


def along(dim: int, parts: list[Tensor]) -> Tensor | None:
    """Return tensors joined along a dimension; None where their other sizes differ."""
    shapes = {(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts if part.dim() > dim}
    if len(shapes) != 1 or any(part.dim() <= dim for part in parts):
        return None
    return torch.cat(parts, dim)


def _without_stand_ins(tensor: Tensor, like: Tensor, dim: int) -> Tensor:
    """Return a tensor without the rows of ranks that had none of their own; they come last."""
    excess = tensor.shape[dim] - like.shape[dim]
    same = [n for d, n in enumerate(tensor.shape) if d != dim]
    if excess > 0 and same == [n for d, n in enumerate(like.shape) if d != dim]:
        return tensor.narrow(dim, 0, like.shape[dim])
    return tensor


def _columns(parts: list[Tensor], like: Tensor) -> Tensor | None:
    """Return slices of tensor ranks as one tensor, if their sizes add up in one dimension.

    Nothing records whether a layer holds several matrices in one, of which each rank has a slice
    of each. So the order that comes nearer to one process counts; a layer whose columns are in a
    wrong order is found by what the next one makes of them.
    """
    if len(parts) < 2 or any(part.dim() != like.dim() for part in parts):
        return None
    for dim in range(like.dim()):
        if sum(part.shape[dim] for part in parts) == like.shape[dim]:
            whole = along(dim, parts)
            if whole is not None and whole.shape == like.shape:
                return _nearest(whole, parts, dim, FUSED, like)
    return None


def distance(tensor: Tensor, like: Tensor) -> float:
    """Return the norm of the difference; infinity where it is not a number."""
    distance = float((tensor - like).norm())
    return inf if isnan(distance) else distance
