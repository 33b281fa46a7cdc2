"""Cross-entropy of logits in slices of the vocabulary.

    loss = log(sum_j exp(x_j)) - (1 - e) x_target - e mean_j x_j        e: label smoothing
    dloss/dx_j = softmax(x)_j - (1 - e) [j = target] - e / V            each rank its slice, nothing to exchange

Source: Shoeybi et al., arXiv:1909.08053, section 3; Szegedy et al., CVPR 2016 (label smoothing).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.comm.axis import Axis
from shoal.platform.torch_private.kernels import assert_async


def vocab_parallel_cross_entropy(
    own: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, axis: Axis
) -> Tensor:
    """(rows,) losses in nats, 0 for ignored rows; the same on every rank. Collective.

    Args: own: (rows, V/T), this rank's logits. target: (rows,) int64, the same on every rank, in
    [0, V).

    Sends the largest logit of each row, then 2 numbers a row, 3 with label smoothing.
    """
    found: Tensor = _CrossEntropy.apply(own, target, ignore_index, label_smoothing, axis)
    return found


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, own: Tensor, target: Tensor, ignore_index: int, smoothing: float, axis: Axis
    ) -> Tensor:
        words = own.shape[1]
        counts = target != ignore_index
        known = ~counts | ((target >= 0) & (target < words * axis.size))
        assert_async(known.all(), f"a target is none of {words * axis.size} words")
        largest = axis.all_reduce_max(own.max(dim=1).values)
        shifted = own - largest.unsqueeze(1)
        place = target - axis.rank * words
        ours = counts & (place >= 0) & (place < words)
        place = torch.where(ours, place, 0).unsqueeze(1)
        picked = torch.where(ours, shifted.gather(1, place).squeeze(1), 0.0)
        exponentials = shifted.exp()
        columns = [exponentials.sum(1), picked, *([shifted.sum(1)] if smoothing else [])]
        sums = axis.all_reduce(torch.stack(columns))
        losses = sums[0].log() - (1 - smoothing) * sums[1]
        if smoothing:
            losses -= smoothing / (words * axis.size) * sums[2]
        probabilities = exponentials.div_(sums[0].unsqueeze(1))
        ctx.save_for_backward(probabilities, place, ours, counts)
        ctx.smoothing, ctx.all_words = smoothing, words * axis.size
        return losses.masked_fill_(~counts, 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        probabilities, place, ours, counts = ctx.saved_tensors
        found = probabilities - ctx.smoothing / ctx.all_words
        found.scatter_add_(1, place, -(1 - ctx.smoothing) * ours.to(found.dtype).unsqueeze(1))
        return found * torch.where(counts, gradient, 0.0).unsqueeze(1), None, None, None, None
