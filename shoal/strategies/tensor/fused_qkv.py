"""Regroup the rows of a fused QKV matrix, which holds query, key and value.

      full       q0 q1 k0 k1 v0 v1          rows of heads 0 and 1
      rank 0     q0 q1 k0                   stored: contiguous, so that every checkpoint has the
      rank 1     k1 v0 v1                   layout of the full model
                    ⇅ all-to-all
      rank 0     q0 k0 v0                   used: all rows of this rank's heads
      rank 1     q1 k1 v1

Each rank sends at most its own rows, 1/T of the matrix, in each forward and backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.axis import Axis
from shoal.strategies.tensor.derivatives import check_first_derivative

all_to_all = getattr(dist, "all_to_all_single")  # noqa: B009 - untyped in torch's stubs


def regroup_qkv(stored: Tensor, axis: Axis, parts: int) -> Tensor:
    """Return this rank's shard of each part, one after the other. Collective.

    Args:
        stored: (rows/T, ...), this rank's shard of all parts as they are stored.
        parts: matrices in one, 3 for query, key and value.
    """
    used: Tensor = _Regroup.apply(stored, axis, parts)
    return used


class _Regroup(torch.autograd.Function):
    """Exchange rows forward; exchange their gradients the other way backward."""

    @staticmethod
    def forward(ctx: Any, stored: Tensor, axis: Axis, parts: int) -> Tensor:
        ctx.axis = axis
        ctx.parts = parts
        num_rows = len(stored) * axis.size
        return _exchange_rows(
            stored, _stored_rows(num_rows, axis), _used_rows(num_rows, axis, parts), axis
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        check_first_derivative()
        num_rows = len(gradient) * ctx.axis.size
        stored_gradient = _exchange_rows(
            gradient,
            _used_rows(num_rows, ctx.axis, ctx.parts),
            _stored_rows(num_rows, ctx.axis),
            ctx.axis,
        )
        return stored_gradient, None, None


def _stored_rows(num_rows: int, axis: Axis) -> list[list[range]]:
    """Return for each rank the rows that it stores."""
    size = num_rows // axis.size
    return [[range(rank * size, (rank + 1) * size)] for rank in range(axis.size)]


def _used_rows(num_rows: int, axis: Axis, parts: int) -> list[list[range]]:
    """Return for each rank the rows that it computes with: 1/T of each part."""
    part_size = num_rows // parts
    size = part_size // axis.size
    return [
        [
            range(part_start + rank * size, part_start + (rank + 1) * size)
            for part_start in range(0, num_rows, part_size)
        ]
        for rank in range(axis.size)
    ]


def _exchange_rows(
    tensor: Tensor, before: list[list[range]], after: list[list[range]], axis: Axis
) -> Tensor:
    """Move rows between ranks: from the assignment `before` to the assignment `after`.

    Args:
        tensor: the rows `before[axis.rank]`.
        before, after: ranges of rows of each rank, in ascending order.
    """
    own = before[axis.rank]
    sent = [_overlaps(own, rows) for rows in after]
    received = [_overlaps(rows, after[axis.rank]) for rows in before]
    slices = [_rows_of(tensor, own, rows) for to_rank in sent for rows in to_rank]
    # Contiguous, also for a transposed matrix: a message is sent as it lies in memory.
    send_buffer = torch.cat(slices).contiguous()
    receive_buffer = torch.empty_like(send_buffer)
    all_to_all(receive_buffer, send_buffer, _num_rows(received), _num_rows(sent), group=axis.group)
    arrived = [rows for from_rank in received for rows in from_rank]
    chunks = receive_buffer.split([len(rows) for rows in arrived])
    in_order = sorted(range(len(arrived)), key=lambda index: arrived[index].start)
    return torch.cat([chunks[index] for index in in_order])


def _overlaps(some: list[range], others: list[range]) -> list[range]:
    """Return the rows that are in both, in ascending order."""
    both = [
        range(max(rows.start, other.start), min(rows.stop, other.stop))
        for rows in some
        for other in others
    ]
    return [rows for rows in both if rows]


def _rows_of(tensor: Tensor, held: list[range], rows: range) -> Tensor:
    """Return some rows of a tensor that holds the rows `held`; `rows` is within one range of it."""
    position = 0
    for each in held:
        if rows.start in each:
            return tensor.narrow(0, position + rows.start - each.start, len(rows))
        position += len(each)
    raise AssertionError(f"rows {rows} are not among {held}")


def _num_rows(rows_by_rank: list[list[range]]) -> list[int]:
    return [sum(len(rows) for rows in from_rank) for from_rank in rows_by_rank]
