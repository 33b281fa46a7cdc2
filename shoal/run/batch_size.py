"""Sizes of a batch: its samples on this rank and on all ranks, by which its loss is weighted.

The loader remembers which tensors it has yielded with which share. A batch that was made from those
tensors, for example by `x.cuda()`, is unknown to it and is taken for the last share. Its shape must
fit that share. Shares may differ in size, as the last one of an epoch does: then samples must lie
in the tensors as they did in earlier batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.data.batch_shards import BatchShard
from shoal.data.sharded_loader import ShardedLoader
from shoal.data.tree_map import tensors_in
from shoal.errors import UsageError
from shoal.strategies.base import LossFunction

Layouts = set[tuple[int, int]]
"""Possible layouts of samples in a tensor, each (dim, entries of that dim for one sample)."""
ONE_ROW_PER_SAMPLE: Layouts = {(0, 1)}


class BatchSizes:
    """Finds the sizes of each batch of one training loop.

    Args:
        loader: yields this rank's shares; None if the user makes the batches.
    """

    def __init__(self, loader: ShardedLoader | None) -> None:
        self._loader = loader
        # For batches of n tensors: the layouts of each tensor that all batches so far allow.
        self._layouts: dict[int, list[Layouts]] = {}
        # The last batch that `_learn_layout` has seen: (yielded by the loader, samples, shapes).
        self._last_learned: tuple[bool, int, list[torch.Size]] | None = None

    def resolve(
        self, loss_fn: LossFunction, batch: tuple[Any, ...]
    ) -> tuple[LossFunction, int, int]:
        """Return the loss function to differentiate, and the samples on this rank and on all ranks.

        Raises:
            UsageError: the loader has not yielded such a batch, or the batch has tensors of several
                shares of different sizes.
        """
        if self._loader is None or self._loader.share is None:
            # The sizes on other ranks are unknown. So the loss becomes a sum with a count, and the
            # counts of all ranks are summed with the gradients.
            return _with_count(loss_fn, _length(batch[-1])), 1, 1
        share = self._share_of(batch, self._loader, self._loader.share)
        return loss_fn, share.rows, share.global_rows

    def _share_of(
        self, batch: tuple[Any, ...], loader: ShardedLoader, last: BatchShard
    ) -> BatchShard:
        """Return the share of these tensors: the one they were yielded with, or else the last."""
        tensors = [tensor for tensor in tensors_in(batch) if tensor.dim()]
        # If all shares so far have one size, the tensors need not be looked up.
        only_size = len(loader.yielded.sizes) == 1
        known = [last] if only_size else loader.yielded.shard_sizes_of(tensors)
        if len(known) > 1:
            sizes = " and ".join(str(share.rows) for share in known)
            raise UsageError(
                f"forward_backward was given tensors of batches of {sizes} samples at once. Give "
                "it one."
            )
        share = known[0] if known else last
        to_learn = bool(known), share.rows, [tensor.shape for tensor in tensors]
        if to_learn != self._last_learned:  # nearly every batch is like the one before
            # A share without samples has one stand-in sample.
            self._learn_layout(tensors, max(share.rows, 1), is_certain=bool(known))
            self._last_learned = to_learn
        return share

    def _learn_layout(self, tensors: list[Tensor], num_samples: int, is_certain: bool) -> None:
        """Remember the layouts that fit this batch and the batches before it.

        Args:
            is_certain: the batch cannot have another number of samples.

        Raises:
            UsageError: so many samples cannot lie in these tensors, or lay otherwise before.
        """
        possible = [_layouts(tensor, num_samples) for tensor in tensors]
        default = possible if is_certain else [ONE_ROW_PER_SAMPLE] * len(tensors)
        before = self._layouts.get(len(tensors), default)
        common = [now & then for now, then in zip(possible, before, strict=True)]
        if tensors and not any(possible if is_certain else common):
            _raise_for_shape(tensors[0], num_samples)
        self._layouts[len(tensors)] = [
            now or then for now, then in zip(common, before, strict=True)
        ]


def _layouts(tensor: Tensor, num_samples: int) -> Layouts:
    """Return the layouts in which a tensor can hold so many samples."""
    layouts: Layouts = set()
    if tensor.shape[0] % num_samples == 0:
        # One row or several for each sample: (batch x sequence, features) has several.
        layouts.add((0, tensor.shape[0] // num_samples))
    if tensor.dim() > 1 and tensor.shape[1] == num_samples:
        layouts.add((1, 1))  # (sequence, batch, ...)
    return layouts


def _raise_for_shape(tensor: Tensor, num_samples: int) -> None:
    raise UsageError(
        f"forward_backward was given a batch of shape {tuple(tensor.shape)}; the loader's last "
        f"share has {num_samples} samples. Give it what the loader yields or run.to_device makes "
        "of that, call it on each batch before the next one is fetched, or prepare without the "
        "loader for batches of your own."
    )


def _with_count(loss_fn: LossFunction, num_samples: int) -> LossFunction:
    """Return `loss_fn` as a function that returns a (sum, count) pair."""

    def sum_and_count(output: Any, target: Any) -> tuple[Tensor, Tensor]:
        value = loss_fn(output, target)
        if isinstance(value, tuple):
            return value
        return value * num_samples, value.new_full((), num_samples)

    return sum_and_count


def _length(target: Any) -> int:
    """Return the length of the first tensor of a nest."""
    if isinstance(target, Mapping):
        return _length(next(iter(target.values())))
    return _length(target[0]) if isinstance(target, (tuple, list)) else len(target)
