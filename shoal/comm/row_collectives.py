"""Differentiable collectives over the samples of a global batch, for losses that couple them.

                      forward                                 backward
    gather_rows       rows of all ranks, in order of ranks    sum over ranks, this rank's rows of it
    sum_over_ranks    sum over ranks                          sum over ranks

The ranks differentiate one objective together: the sum over ranks of what each rank's backward pass
begins with. So a gradient with respect to a value that all ranks read is the sum of what they ask
of it. Let rank r begin with `rows_r / rows * loss_r`, as a data strategy does. Then a loss of the
gathered rows may be computed whole on every rank, for the weights add up to 1; or each rank takes
the mean over its own rows. Both give the gradients of one device, for shares of any sizes.

All ranks of the axis must call them in the same order, with results on which their losses depend,
because the backward pass is collective too.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.comm.axis import Axis
from shoal.comm.equal_chunks import all_gather
from shoal.errors import UsageError


def gather_rows(x: Tensor, axis: Axis, rows_per_rank: Sequence[int] | None = None) -> Tensor:
    """Return the rows of all ranks, in order of ranks. Collective, in the backward pass too.

    Args:
        x: (rows, ...) of any dtype. Ranks may have different numbers of rows, or none; all other
            dims, and the dtype, are the same on all ranks.
        axis: the ranks; with one rank, `x` itself is returned.
        rows_per_rank: rows of each rank, if all ranks know them; else they are asked for.

    Returns: (sum of rows_per_rank, ...), the same on every rank, and differentiable once.

    Raises: UsageError: see `count_rows`; or a gradient of the result is differentiated again.
    """
    if axis.size == 1:
        return x
    if rows_per_rank is None:
        rows_per_rank = count_rows(x, axis)
    # A tensor in slices (tensor parallelism) becomes whole by a function that knows no slices.
    x = x.narrow(0, 0, len(x))
    gathered: Tensor = _GatherRows.apply(x, axis, tuple(rows_per_rank))
    return gathered


def sum_over_ranks(x: Tensor, axis: Axis) -> Tensor:
    """Return the sum of `x` over all ranks, differentiable any number of times.

    Collective, in the backward pass too. With one rank, `x` itself is returned.
    """
    if axis.size == 1:
        return x
    total: Tensor = _SumOverRanks.apply(x, axis)
    return total


def count_rows(x: Tensor, axis: Axis) -> list[int]:
    """Return the number of rows of each rank, in order of ranks. Collective.

    Args: x: as for `gather_rows`.

    Raises: UsageError: `x` has no dim of rows; or, on all ranks, other dims or dtypes differ.
    """
    if x.dim() == 0:
        raise UsageError(
            "gather was given a scalar tensor; it gathers rows. Give it a tensor with one row for "
            "each sample."
        )
    if axis.size == 1:
        return [len(x)]
    row = f"{x.dtype}, rows of shape {tuple(x.shape[1:])}"
    own = torch.tensor([len(x), zlib.crc32(row.encode())], device=axis.host_device)
    table = own.new_empty(axis.size, 2)
    all_gather(table, own, axis.group)
    counts, kinds = table.T.tolist()
    if len(set(kinds)) > 1:
        raise UsageError(
            f"gather needs the same dtype and the same shape of a row on all ranks; on rank "
            f"{axis.rank} of {axis.size} it is {row}, and others have something else."
        )
    rows: list[int] = counts
    return rows


def is_of_all_ranks(node: Any) -> bool:
    """Return True for a node of a graph whose output comes from the rows of all ranks."""
    functions = _GatherRows, _SumOverRanks
    return node.name() in [f"{function.__name__}Backward" for function in functions]


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, rows: tuple[int, ...]) -> Tensor:
        ctx.axis, ctx.rows = axis, rows
        # Bits of a bool are sent as bytes: not every backend sends bools.
        sent = x.detach().view(torch.uint8) if x.dtype is torch.bool else x.detach()
        longest = max(rows)
        padded = sent.new_zeros(longest, *x.shape[1:])
        padded[: len(x)] = sent
        gathered = sent.new_empty(axis.size * longest, *x.shape[1:])
        if gathered.numel():
            all_gather(gathered, padded, axis.group)
        if longest == 0:
            return gathered.view(x.dtype)
        pieces = zip(gathered.split(longest), rows, strict=True)
        return torch.cat([piece[:count] for piece, count in pieces]).view(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise UsageError(
                "a gradient of gathered rows was to be differentiated again (create_graph=True). "
                "Inside of compute_loss it would be the sum over all ranks' losses, without their "
                "weights. Gather the rows after that gradient is taken, or use one rank."
            )
        total = gradient.clone(memory_format=torch.contiguous_format)
        start = sum(ctx.rows[: ctx.axis.rank])
        return ctx.axis.all_reduce(total)[start : start + ctx.rows[ctx.axis.rank]], None, None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return axis.all_reduce(x.detach().clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _SumOverRanks.apply(gradient, ctx.axis), None
