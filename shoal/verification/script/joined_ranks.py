"""Tensors of all ranks as the one tensor of one process: outputs of modules and their gradients.

    data ranks       rows 0 1 2 | rows 3 4            joined along the batch, in order of ranks
    time first       t0r0 t1r0 | t0r1 t1r1            joined within each time
    micro-batches    rows 0 1 | row 2                 joined in the order of calls or ranks
    tensor ranks     columns 0-3 | columns 4-7        joined where their sizes add up
    fused layers     q0 k0 v0 | q1 k1 v1              query, key and value joined one by one

One process says which shape comes of it; a tensor that cannot have that shape is not compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from math import gcd, inf, isnan

import torch
from torch import Tensor

from shoal.verification.script.run_record import RankRecord, RecordedTensors

FUSED = (2, 3)
"""Numbers of equal matrices that a layer may hold in one: gate and up; query, key and value."""
SAME_ORDER = 1e-6
"""Relative distance below which no other order of rows is tried."""
Pieces = list[list[Tensor]]
"""For each data rank the tensors of its micro-batches."""


class RanksOfStep:
    """The calls and tensors of a step on all ranks.

    Args:
        ranks: the indices of all ranks.
        files: their tensors of this step.
        step: the number of the step, from 1.
    """

    def __init__(
        self, ranks: Sequence[RankRecord], files: Sequence[RecordedTensors], step: int
    ) -> None:
        self._ranks = ranks
        self._files = files
        self._places: list[dict[str, list[int]]] = []
        for record in ranks:
            calls: dict[str, list[int]] = {}
            for index, call in enumerate(record.steps[step - 1].calls):
                calls.setdefault(call.module, []).append(index)
            self._places.append(calls)

    def versions(
        self,
        kind: str,
        module: str,
        call: int,
        output: int,
        like: Tensor,
        likes: Sequence[Tensor | None],
    ) -> list[Tensor]:
        """Return the joined tensor; several where ranks hold copies of it; none if unknown.

        Args:
            kind: "forward" or "backward".
            module, call, output: its place in the record of one process: the number of the call
                among those of this module in the step, and of the output.
            like, likes: the tensor of one process, and those of all these calls.
        """
        found = self._joined(kind, module, slice(call, None, len(likes)), output, like)
        limit = SAME_ORDER * float(like.norm())
        known = [tensor for tensor in likes if tensor is not None]
        is_near = found and all(_distance(tensor, like) <= limit for tensor in found)
        whole = None if is_near or len(known) < max(2, len(likes)) else _along(0, known)
        if whole is None:
            return found
        # One process has micro-batches too, and a rank has its own rows of all of them.
        rows = sum(len(tensor) for tensor in known[:call]), len(like)
        by_rank = self._joined(kind, module, slice(None), output, whole)
        cut = [tensor.narrow(0, *rows) for tensor in by_rank]
        nearest = min((_distance(tensor, like) for tensor in cut), default=inf)
        return cut if all(nearest < _distance(tensor, like) for tensor in found) else found

    def _joined(
        self, kind: str, module: str, calls: slice, output: int, like: Tensor
    ) -> list[Tensor]:
        """Return `versions` of some calls of each rank, in the order of ranks."""
        groups: dict[int, dict[int, list[Tensor]]] = {}
        for record, files, places in zip(self._ranks, self._files, self._places, strict=True):
            mine = places.get(module, [])
            if not mine or len(mine) % (calls.step or 1):
                continue
            names = [f"{kind}/{index}/{output}" for index in mine[calls]]
            if not all(name in files for name in names):
                continue
            tensor, data = record.axis("tensor")[0], record.axis("data")[0]
            groups.setdefault(tensor, {})[data] = [files[name] for name in names]
        wholes = []
        for by_data in groups.values():
            pieces = [by_data[data] for data in sorted(by_data)]
            if len(pieces) < self._ranks[0].axis("data")[1]:
                continue
            wholes.append(pieces)
        return _versions(wholes, like, has_stand_ins=self._ranks[0].by_shoal)


def _versions(groups: list[Pieces], like: Tensor, has_stand_ins: bool) -> list[Tensor]:
    """Return what the pieces of each tensor rank give, as tensors of the shape of `like`.

    Args: has_stand_ins: ranks without rows of their own have computed one of another rank.
    """
    for dim in range(min(2, like.dim())):
        found = _joined_along(dim, groups)
        if not found:
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
    if len(parts) < 2 or _distance(joined, like) <= SAME_ORDER * float(like.norm()):
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
    return min(orders, key=lambda order: _distance(order, like))


def _joined_along(dim: int, groups: list[Pieces]) -> list[Tensor]:
    """Return the pieces of each tensor rank joined; nothing if those of one do not fit."""
    joined = [_along(dim, [*chain.from_iterable(group)]) for group in groups]
    found = [tensor for tensor in joined if tensor is not None]
    return found if len(found) == len(groups) else []


def _along(dim: int, parts: list[Tensor]) -> Tensor | None:
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
            whole = _along(dim, parts)
            if whole is not None and whole.shape == like.shape:
                return _nearest(whole, parts, dim, FUSED, like)
    return None


def _distance(tensor: Tensor, like: Tensor) -> float:
    """Return the norm of the difference; infinity where it is not a number."""
    distance = float((tensor - like).norm())
    return inf if isnan(distance) else distance
