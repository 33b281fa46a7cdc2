"""How many samples a batch has, on this rank and in all: what its loss is weighed by.

The loader knows which share it yielded with which tensors. A batch that was made anew from what it
yielded, say by
`x.cuda()`, is taken for the last one yielded, if its shape agrees: where shares differ in size, as
the last one of an epoch may, samples must lie in it as they did before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.data.batch_shards import BatchShard
from shoal.data.loader import DistributedBatchLoader
from shoal.data.tree_map import tensors_in
from shoal.errors import UsageError
from shoal.strategies.base import LossFunction

Layouts = set[tuple[int, int]]
"""Ways for samples to lie in a tensor: (dimension, entries of it for each sample)."""
ONE_ROW_PER_SAMPLE: Layouts = {(0, 1)}


class BatchSizes:
    """Finds the rows of each batch of one loop.

    Args: loader: of this rank's shares; None where batches are the user's own.
    """

    def __init__(self, loader: DistributedBatchLoader | None) -> None:
        self._loader = loader
        self._layouts: dict[int, list[Layouts]] = {}  # of the tensors of a batch, by their number
        self._met: tuple[bool, int, list[torch.Size]] | None = (
            None  # the last batch, as far as `_learn` cares
        )

    def resolve(
        self, loss_fn: LossFunction, batch: tuple[Any, ...]
    ) -> tuple[LossFunction, int, int]:
        """The loss function to differentiate, this rank's rows and the global ones.

        Raises: UsageError: the batch is not one that the loader has yielded, or cannot be told from
        another."""
        if self._loader is None or self._loader.share is None:
            # Nobody knows the other ranks' rows: the loss counts for itself, and the counts ride
            # with the gradients.
            return _counted(loss_fn, _length(batch[-1])), 1, 1
        share = self._rows_on_this_rank(batch, self._loader, self._loader.share)
        return loss_fn, share.rows, share.global_rows

    def _rows_on_this_rank(
        self, batch: tuple[Any, ...], loader: DistributedBatchLoader, last: BatchShard
    ) -> BatchShard:
        tensors = [tensor for tensor in tensors_in(batch) if tensor.dim()]
        # Where all shares so far are of one size, no other can be meant.
        known = [last] if len(loader.yielded.sizes) == 1 else loader.yielded.shard_sizes_of(tensors)
        if len(known) > 1:
            sizes = " and ".join(str(share.rows) for share in known)
            raise UsageError(
                f"forward_backward was given tensors of batches of {sizes} samples at once. Give "
                "it one."
            )
        share = known[0] if known else last
        met = bool(known), share.rows, [tensor.shape for tensor in tensors]
        if met != self._met:  # nearly every batch is like the one before
            self._learn_layout(tensors, max(share.rows, 1), alone=bool(known))
            self._met = met
        return share

    def _learn_layout(self, tensors: list[Tensor], rows: int, alone: bool) -> None:
        """How so many rows lie in these tensors.

        Args: alone: no other number of rows can be meant.
        Raises: UsageError: they cannot lie there, or did otherwise before.
        """
        found = [_layouts(tensor, rows) for tensor in tensors]
        before = self._layouts.get(
            len(tensors), found if alone else [ONE_ROW_PER_SAMPLE] * len(tensors)
        )
        both = [now & then for now, then in zip(found, before, strict=True)]
        if tensors and not any(found if alone else both):
            _refuse(tensors[0], rows)
        self._layouts[len(tensors)] = [now or then for now, then in zip(both, before, strict=True)]


def _layouts(tensor: Tensor, rows: int) -> Layouts:
    """Samples may stand in the second dimension, or a batch may be flattened to so many entries
    each.
    """
    found = {(0, tensor.shape[0] // rows)} if tensor.shape[0] % rows == 0 else set()
    return found | ({(1, 1)} if tensor.dim() > 1 and tensor.shape[1] == rows else set())


def _refuse(tensor: Tensor, rows: int) -> None:
    raise UsageError(
        f"forward_backward was given a batch of shape {tuple(tensor.shape)}; the loader's last "
        f"share has {rows} "
        "samples. Give it what the loader yields or run.move makes of that, call it on each batch "
        "before the next one "
        "is fetched, or prepare without the loader for batches of your own."
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
