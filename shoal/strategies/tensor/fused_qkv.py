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


def _stored_rows(num_rows: int, axis: Axis) -> list[list[int]]:
    """Return for each rank the rows that it stores."""
    size = num_rows // axis.size
    return [list(range(rank * size, (rank + 1) * size)) for rank in range(axis.size)]


def _used_rows(num_rows: int, axis: Axis, parts: int) -> list[list[int]]:
    """Return for each rank the rows that it computes with: 1/T of each part."""
    part_size = num_rows // parts
    size = part_size // axis.size
    rows_by_rank = []
    for rank in range(axis.size):
        rows: list[int] = []
        for part_start in range(0, num_rows, part_size):
            rows += range(part_start + rank * size, part_start + (rank + 1) * size)
        rows_by_rank.append(rows)
    return rows_by_rank


def _exchange_rows(
    tensor: Tensor, before: list[list[int]], after: list[list[int]], axis: Axis
) -> Tensor:
    """Move rows between ranks: from the assignment `before` to the assignment `after`."""
    owner = {row: rank for rank, rows in enumerate(before) for row in rows}
    send_rows = [[row for row in rows if owner[row] == axis.rank] for rows in after]
    receive_rows = [
        [row for row in after[axis.rank] if owner[row] == rank] for rank in range(axis.size)
    ]
    send_order = _positions(_concatenate(send_rows), before[axis.rank], tensor.device)
    # Contiguous, also for a transposed matrix: a message is sent as it lies in memory.
    send_buffer = tensor[send_order].contiguous()
    receive_buffer = torch.empty_like(send_buffer)
    all_to_all(
        receive_buffer,
        send_buffer,
        [len(rows) for rows in receive_rows],
        [len(rows) for rows in send_rows],
        group=axis.group,
    )
    return receive_buffer[_positions(after[axis.rank], _concatenate(receive_rows), tensor.device)]


def _concatenate(lists: list[list[int]]) -> list[int]:
    return [row for rows in lists for row in rows]


def _positions(rows: list[int], order: list[int], device: torch.device) -> Tensor:
    """Return the index of each of `rows` in `order`."""
    position = {row: index for index, row in enumerate(order)}
    return torch.tensor([position[row] for row in rows], device=device)
