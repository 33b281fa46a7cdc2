"""How many samples a batch has, on this rank and in all: what its loss is weighed by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from shoal.data.shares import Share
from shoal.errors import UsageError
from shoal.strategies.base import LossFunction


def weighed(
    loss_fn: LossFunction, inputs: tuple[Any, ...], target: Any, share: Share | None
) -> tuple[LossFunction, int, int]:
    """The loss function to differentiate, this rank's rows and the global ones; `share` is the loader's last."""
    if share is None:
        # Nobody knows the other ranks' rows: the loss counts for itself, and the counts ride with the gradients.
        return _counted(loss_fn, _length(target)), 1, 1
    _check_rows((*inputs, target), share.rows)
    return loss_fn, share.rows, share.global_rows


def _check_rows(batch: tuple[Any, ...], rows: int) -> None:
    """Refuse a batch that is clearly not the one that the loader yielded last.

    Samples may stand in the second dimension, or a batch may be flattened to so many rows each.
    """
    tensors = [item for item in batch if isinstance(item, Tensor) and item.dim()]
    wrong = [t for t in tensors if t.shape[0] % max(rows, 1) and (t.dim() < 2 or t.shape[1] != rows)]
    if wrong and len(wrong) == len(tensors):
        raise UsageError(
            f"forward_backward was given a batch of shape {tuple(wrong[0].shape)}; the loader's last share has "
            f"{max(rows, 1)} samples. Call it on each batch before the next one is fetched, or prepare without the "
            "loader for batches of your own."
        )


def _counted(loss_fn: LossFunction, rows: int) -> LossFunction:
    """`loss_fn` as a (sum, count) pair."""

    def counted(output: Any, target: Any) -> tuple[Tensor, Tensor]:
        value = loss_fn(output, target)
        return value if isinstance(value, tuple) else (value * rows, value.new_full((), rows))

    return counted


def _length(target: Any) -> int:
    if isinstance(target, Mapping):
        return _length(next(iter(target.values())))
    return _length(target[0]) if isinstance(target, (tuple, list)) else len(target)
