"""torch's own attention and transformer layers, in slices of heads and of hidden units."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.comm.mappings import local_slice, reduce_from_region
from shoal.errors import UsageError
from shoal.platform.torch_private.kernels import safe_softmax
from shoal.strategies.tensor.dropout_rng import dropout_factors
from shoal.strategies.tensor.fused_qkv import regroup_qkv
from shoal.strategies.tensor.linear import add_bias, row_parallel_matmul
from shoal.strategies.tensor.region import Region, local_shard

NESTED = (
    "tensor: in evaluation nn.TransformerEncoder hands padded sequences to its layers as nested "
    "tensors, which layers "
    "in slices do not take. Make it with enable_nested_tensor=False; what it gives for padded "
    "tokens is then computed "
    "like that of others, in evaluation as in training, and no longer 0."
)


class SlicedMultiheadAttention(nn.MultiheadAttention):
    """nn.MultiheadAttention with some of the heads on each rank.

    Attributes: sequence: the output lies in slices of the sequence.
    """

    region: Region
    sequence: bool

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As in torch; with `need_weights` the weights are the mean over all heads, or of each
        head.
        """
        if is_causal and attn_mask is None:
            raise UsageError(
                "attention with is_causal=True needs attn_mask as well, as it does on one device."
            )
        if query.is_nested:
            raise UsageError(NESTED)
        with _AttentionRegion(self.region):
            inputs = [x if query.dim() == 3 else x.unsqueeze(0) for x in (query, key, value)]
            if not self.batch_first and query.dim() == 3:
                swapped = {
                    id(x): x.transpose(0, 1) for x in (query, key, value)
                }  # one input stays one
                inputs = [swapped[id(x)] for x in (query, key, value)]
            mask = self._mask(query, key, key_padding_mask, attn_mask)
            heads, weights = self._heads(inputs, mask, need_weights)
            # Time first in memory, as torch has it: a dropout that follows draws in that order.
            merged = heads.permute(2, 0, 1, 3).flatten(-2)
            along = 0 if self.sequence and query.dim() == 3 else None
            output = row_parallel_matmul(
                merged, local_shard(self.out_proj.weight), self.region.axis, along
            )
        output = add_bias(output, self.out_proj.bias)
        if query.dim() == 2:
            output = output.squeeze(1)
        elif self.batch_first:
            output = output.transpose(0, 1)
        return output, self._all_weights(weights, average_attn_weights, batched=query.dim() == 3)

    def _heads(
        self, inputs: list[Tensor], mask: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(batch, heads, time, width of a head) of this rank, and its weights where they are
        needed.
        """
        axis = self.region.axis
        weights = regroup_qkv(local_shard(self.in_proj_weight), axis, 3).chunk(3)
        bias = self.in_proj_bias
        biases = (None,) * 3 if bias is None else regroup_qkv(local_shard(bias), axis, 3).chunk(3)
        q, k, v = (
            self.region.entered(x).linear(w, b).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for x, w, b in zip(inputs, weights, biases, strict=True)
        )
        if self.dropout == 0 or not self.training:
            if not need_weights:
                return F.scaled_dot_product_attention(q, k, v, attn_mask=mask), None
            scores = _scores(q, k, mask)
            return scores @ v, scores
        scores = _scores(q, k, mask, safe=not need_weights)
        scores = scores * dropout_factors(scores, self.dropout, axis)
        return scores @ v, scores if need_weights else None

    def _mask(
        self, query: Tensor, key: Tensor, padding: Tensor | None, mask: Tensor | None
    ) -> Tensor | None:
        """Both masks as numbers to be added; of one mask for each head this rank's."""
        axis = self.region.axis
        found = None
        if mask is not None:
            found = _numbers(mask, query.dtype)
            if mask.dim() == 3:  # (batch x heads, time, time)
                found = local_slice(found.unflatten(0, (-1, self.num_heads)), axis, 1)
        if padding is not None:
            hidden = _numbers(padding, query.dtype)
            hidden = (hidden if padding.dim() == 2 else hidden.unsqueeze(0))[:, None, None, :]
            found = hidden if found is None else found + hidden
        return found

    def _all_weights(self, own: Tensor | None, average: bool, batched: bool) -> Tensor | None:
        if own is None:
            return None
        axis = self.region.axis
        if average:
            weights = reduce_from_region(own.sum(1) / self.num_heads, axis)
        else:
            whole = own.new_zeros(len(own), self.num_heads, *own.shape[2:])
            local_slice(whole, axis, 1).copy_(own)
            weights = reduce_from_region(whole, axis)
        return weights if batched else weights.squeeze(0)


class _AttentionRegion:
    """The region of an attention is the attention itself."""

    def __init__(self, region: Region) -> None:
        self.region = region

    def __enter__(self) -> None:
        self.region.depth += 1

    def __exit__(self, *_: Any) -> None:
        self.region.depth -= 1
        self.region.copies = []


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, safe: bool = False) -> Tensor:
    """Args: safe: a row with all keys hidden is 0, as where torch leaves it to SDPA, and not
    NaN.
    """
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    scores = scores if mask is None else scores + mask
    return safe_softmax(scores, -1) if safe else scores.softmax(-1)


def _numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, -torch.inf)
