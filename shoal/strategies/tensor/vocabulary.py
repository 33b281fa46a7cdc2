"""The embedding, the head, its logits and their loss, divided along the vocabulary.

embedding   each rank looks up its words; zeros for others; the sum over ranks is the output
head        each rank computes the logits of its words; they are not gathered
loss        each rank's logits, then 3 numbers per row are exchanged:

      rank 0   logits of words 0..3 ── largest, sum of exponentials, the target's ──┐
      rank 1   logits of words 4..7 ── largest, sum of exponentials, the target's ──┴─> 3, not 8

    loss = log(sum_j exp(x_j)) - (1 - e) x_target - e mean_j x_j        e: label smoothing
    dloss/dx_j = softmax(x)_j - (1 - e) [j = target] - e / V            local to each rank

`VocabParallelLogits` has the shape of all logits. Cross-entropy, argmax over the vocabulary, and
functions that leave the vocabulary alone run on shards. Any other function gets all logits,
gathered once (`lazy_gather.py`): slower, and as exact.

Sources: Shoeybi et al., arXiv:1909.08053, section 3; Szegedy et al., CVPR 2016 (label smoothing).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.comm.axis import Axis
from shoal.comm.mappings import reduce_from_region
from shoal.platform.torch_private.kernels import assert_async
from shoal.strategies.tensor.lazy_gather import AUTOGRAD_FUNCTIONS, LazyGatherTensor
from shoal.strategies.tensor.region import local_shard, sum_of_ranks, to_column_input


class VocabParallelEmbedding(nn.Embedding):
    """Looks up this rank's words; the sum over ranks is the output.

    Attributes:
        axis: the tensor axis.
        shard_dim: the sequence dimension of the output if it is sequence parallel; else None.
    """

    axis: Axis
    shard_dim: int | None

    def forward(self, input: Tensor) -> Tensor:
        words_per_rank = self.num_embeddings // self.axis.size
        first_word = self.axis.rank * words_per_rank
        is_valid = (input >= 0) & (input < self.num_embeddings)
        # torch's kernel would not see an index that no rank has: all would give zeros.
        assert_async(
            is_valid.all(), f"index out of range in an embedding of {self.num_embeddings} rows"
        )
        is_local = (input >= first_word) & (input < first_word + words_per_rank)
        local_index = torch.where(is_local, input - first_word, 0)
        padding_index = None if self.padding_idx is None else self.padding_idx - first_word
        if padding_index is not None and not 0 <= padding_index < words_per_rank:
            padding_index = None
        embedded = F.embedding(local_index, local_shard(self.weight), padding_index)
        partial = embedded.masked_fill(~is_local.unsqueeze(-1), 0.0)
        return sum_of_ranks(partial, self.axis, self.shard_dim)


class VocabParallelHead(nn.Linear):
    """Computes this rank's logits, as a tensor that is gathered where all are needed."""

    axis: Axis

    def forward(self, x: Tensor) -> Tensor:
        column_input = to_column_input(x, self.axis)
        logits = column_input.linear(local_shard(self.weight), local_shard(self.bias))
        return VocabParallelLogits.of(logits, self.axis)


class VocabParallelLogits(LazyGatherTensor):
    """Logits (..., V), of which this rank has (..., V/T)."""

    @staticmethod
    def of(local: Tensor, axis: Axis) -> VocabParallelLogits:
        """Wrap this rank's logits."""
        return VocabParallelLogits.from_local(local, axis, local.dim() - 1)


def _elementwise(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return a function of logits that calls `function` on this rank's shard."""
    return lambda x, *args, **options: x.like(function(x.local, *args, **options))


def _flatten(x: VocabParallelLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    if x.dim() < 2 or end_dim % x.dim() == x.dim() - 1:
        return NotImplemented
    return x.like(x.local.flatten(start_dim, end_dim))


def _view(x: VocabParallelLogits, *shape: Any) -> Any:
    """Run a view or reshape that keeps the vocabulary as the last dimension."""
    is_one_sequence = len(shape) == 1 and not isinstance(shape[0], int)
    sizes = tuple(shape[0]) if is_one_sequence else shape
    if not sizes or sizes[-1] != x.shape[-1]:
        return NotImplemented
    return x.like(x.local.reshape(*sizes[:-1], x.local.shape[-1]))


def _getitem(x: VocabParallelLogits, index: Any) -> Any:
    """Choose positions of a sequence, as `[..., :-1, :]` does; not words of the vocabulary."""
    entries = index if isinstance(index, tuple) else (index,)
    if not all(entry is Ellipsis or isinstance(entry, (int, slice)) for entry in entries):
        return NotImplemented
    reaches_last_dim = len(entries) == x.dim() or Ellipsis in entries
    if reaches_last_dim and (entries[-1] != slice(None) or entries.count(Ellipsis) > 1):
        return NotImplemented
    return x.like(x.local[index])


def _to(x: VocabParallelLogits, *args: Any, **options: Any) -> Any:
    dtype = args[0] if args else options.get("dtype")
    if not isinstance(dtype, torch.dtype) or len(args) > 1:
        return NotImplemented
    return x.like(x.local.to(dtype))


def _argmax(x: VocabParallelLogits, dim: int | None = None, keepdim: bool = False) -> Any:
    if dim is None or dim % x.dim() != x.dim() - 1:
        return NotImplemented
    local_max, local_index = x.local.max(dim=-1, keepdim=keepdim)
    global_max = x.axis.all_reduce_max(
        local_max.detach().clone(memory_format=torch.contiguous_format)
    )
    words_per_rank = x.local.shape[-1]
    num_words = x.axis.size * words_per_rank
    # Of equal logits the first counts, as on one device: it has the most words after it.
    words_after = num_words - (local_index + x.axis.rank * words_per_rank)
    candidates = torch.where(local_max == global_max, words_after, 0)
    return num_words - x.axis.all_reduce_max(candidates)


def _cross_entropy(
    x: VocabParallelLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    is_supported = weight is None and size_average is None and reduce is None
    if not is_supported or x.dim() > 2 or target.is_floating_point():
        return NotImplemented
    local = x.local
    # Autocast computes a loss in float32.
    if torch.is_autocast_enabled(local.device.type) and local.dtype.itemsize < 4:
        local = local.float()
    rows, targets = local.view(-1, local.shape[-1]), target.reshape(-1)
    losses = _losses(rows, targets, targets != ignore_index, label_smoothing, x.axis)
    if reduction == "none":
        return losses.view(target.shape)
    total = losses.sum()
    return total / (target != ignore_index).sum() if reduction == "mean" else total


def _losses(
    logits: Tensor, target: Tensor, is_counted: Tensor, smoothing: float, axis: Axis
) -> Tensor:
    """Return losses in nats, (rows,), 0 for rows that are not counted; the same on every rank.

    Of logits (rows, V/T), this rank's, and targets (rows,), int64 in [0, V) where they are counted.
    Sends the largest logit of each row, then 2 numbers a row, 3 with label smoothing.
    """
    words_per_rank = logits.shape[1]
    num_words = words_per_rank * axis.size
    is_valid = ~is_counted | ((target >= 0) & (target < num_words))
    assert_async(is_valid.all(), f"a target is none of {num_words} words")

    # exp(x - max) cannot overflow; the maximum cancels in the loss.
    largest = axis.all_reduce_max(logits.detach().max(dim=1).values)
    shifted = logits - largest.unsqueeze(1)

    local_target = target - axis.rank * words_per_rank
    is_local = is_counted & (local_target >= 0) & (local_target < words_per_rank)
    local_target = torch.where(is_local, local_target, 0).unsqueeze(1)
    target_logits = torch.where(is_local, shifted.gather(1, local_target).squeeze(1), 0.0)

    terms = [shifted.exp().sum(1), target_logits]
    if smoothing:
        terms.append(shifted.sum(1))
    sums = reduce_from_region(torch.stack(terms), axis)
    losses = sums[0].log() - (1 - smoothing) * sums[1]
    if smoothing:
        losses = losses - smoothing / num_words * sums[2]
    return losses.masked_fill(~is_counted, 0.0)


VocabParallelLogits.shard_functions = {
    **AUTOGRAD_FUNCTIONS,
    F.cross_entropy: _cross_entropy,
    Tensor.argmax: _argmax,
    torch.argmax: _argmax,
    Tensor.flatten: _flatten,
    torch.flatten: _flatten,
    Tensor.view: _view,
    Tensor.reshape: _view,
    torch.reshape: _view,
    Tensor.__getitem__: _getitem,
    Tensor.to: _to,
    **{f: _elementwise(f) for f in (Tensor.float, Tensor.double, Tensor.contiguous, Tensor.clone)},
}
