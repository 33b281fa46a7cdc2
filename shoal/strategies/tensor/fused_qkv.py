"""One matrix for query, key and value: its rows lie in the order of the whole model, and are
regrouped to be used.

      whole      q0 q1 k0 k1 v0 v1          rows of heads 0 and 1
      rank 0     q0 q1 k0                   what it holds: contiguous, so that a checkpoint has one layout
      rank 1     k1 v0 v1
                    ⇅ all-to-all
      rank 0     q0 k0 v0                   what it computes with
      rank 1     q1 k1 v1

Each rank sends rows of the matrix, at most 1/T of it, forward and backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.comm.axis import Axis
from shoal.strategies.tensor.region import Region, local_shard

all_to_all = getattr(dist, "all_to_all_single")  # noqa: B009 - untyped in torch's stubs


class FusedColumnLinear(nn.Linear):
    """A column layer of several matrices, one below the other."""

    region: Region
    parts: int

    def forward(self, x: Tensor) -> Tensor:
        axis = self.region.axis
        weight = regroup_qkv(local_shard(self.weight), axis, self.parts)
        bias = None if self.bias is None else regroup_qkv(local_shard(self.bias), axis, self.parts)
        return self.region.entered(x).linear(weight, bias)


def regroup_qkv(own: Tensor, axis: Axis, parts: int) -> Tensor:
    """This rank's slice of each part, from slices of all of them one after the other.
    Collective.
    """
    found: Tensor = _Regrouped.apply(own, axis, parts)
    return found


class _Regrouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, axis: Axis, parts: int) -> Tensor:
        ctx.axis, ctx.parts = axis, parts
        rows = len(own) * axis.size
        held, wanted = _local_rows(rows, axis), _target_rows(rows, axis, parts)
        return _exchanged(own, held, wanted, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rows = len(gradient) * ctx.axis.size
        held, wanted = _local_rows(rows, ctx.axis), _target_rows(rows, ctx.axis, ctx.parts)
        return _exchanged(gradient, wanted, held, ctx.axis), None, None


def _local_rows(rows: int, axis: Axis) -> list[list[int]]:
    """Each rank's rows as it holds them."""
    size = rows // axis.size
    return [list(range(rank * size, (rank + 1) * size)) for rank in range(axis.size)]


def _target_rows(rows: int, axis: Axis, parts: int) -> list[list[int]]:
    """Each rank's rows as it computes with them."""
    part = rows // parts
    size = part // axis.size
    return [
        [
            start + row
            for start in range(0, rows, part)
            for row in range(rank * size, (rank + 1) * size)
        ]
        for rank in range(axis.size)
    ]


def _exchanged(own: Tensor, before: list[list[int]], after: list[list[int]], axis: Axis) -> Tensor:
    """Rows that lie as in `before`, as in `after`."""
    owner = {row: rank for rank, rows in enumerate(before) for row in rows}
    sent = [[row for row in rows if owner[row] == axis.rank] for rows in after]
    received = [
        [row for row in after[axis.rank] if owner[row] == rank] for rank in range(axis.size)
    ]
    # Contiguous, also where the matrix lies the other way round: messages are what lies in memory.
    packed = own[_places(_joined(sent), before[axis.rank], own.device)].contiguous()
    arrived = torch.empty_like(packed)
    all_to_all(
        arrived,
        packed,
        [len(rows) for rows in received],
        [len(rows) for rows in sent],
        group=axis.group,
    )
    return arrived[_places(after[axis.rank], _joined(received), own.device)]


def _joined(lists: list[list[int]]) -> list[int]:
    return [row for rows in lists for row in rows]


def _places(rows: list[int], order: list[int], device: torch.device) -> Tensor:
    """Find the place of each of `rows` in `order`."""
    places = {row: place for place, row in enumerate(order)}
    return torch.tensor([places[row] for row in rows], device=device)
