"""nn.MultiheadAttention that is divided between heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.comm.mappings import local_slice, reduce_from_region
from shoal.errors import UsageError
from shoal.strategies.tensor.dropout_rng import GlobalDropout, dropout_factors
from shoal.strategies.tensor.parallel_layers import add_bias, regroup_qkv, row_parallel_matmul
from shoal.strategies.tensor.region import Region, local_shard

NESTED_TENSOR_MESSAGE = (
    "tensor: in evaluation nn.TransformerEncoder hands padded sequences to its layers as nested "
    "tensors, which layers in slices do not take. Make it with enable_nested_tensor=False; what it "
    "gives for padded tokens is then computed like that of others, in evaluation as in training, "
    "and no longer 0."
)


class ShardedMultiheadAttention(nn.MultiheadAttention):
    """nn.MultiheadAttention with 1/T of the heads on each rank.

    Attributes:
        region: the attention itself: its layers run only inside its own forward pass.
        sequence: True if the output is sequence parallel.
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
        """Compute as torch does. Weights are those of all heads, or their mean. Collective.

        Raises:
            UsageError: a causal flag without a mask, nested tensors, or a sequence without a batch.
        """
        if is_causal and attn_mask is None:
            raise UsageError(
                "attention with is_causal=True needs attn_mask as well, as it does on one device."
            )
        if query.is_nested:
            raise UsageError(NESTED_TENSOR_MESSAGE)
        if query.dim() != 3:
            raise UsageError(
                "tensor: attention in slices takes a batch of sequences (3 dimensions), and got "
                f"{tuple(query.shape)}. Add a dimension of one sample, x.unsqueeze(...), or keep "
                "the attention whole by the strategy's option `whole`."
            )
        with self.region:  # which does not call this module, as it does others
            inputs = self._batch_first_inputs(query, key, value)
            mask = self._merge_masks(query, key_padding_mask, attn_mask)
            heads, weights = self._attend(inputs, mask, need_weights)
            # Time first in memory, as in torch: a dropout that follows draws in this order.
            merged = heads.permute(2, 0, 1, 3).flatten(-2)
            out_weight = local_shard(self.out_proj.weight)
            shard_dim = 0 if self.sequence else None
            output = row_parallel_matmul(merged, out_weight, self.region.axis, shard_dim)
        output = add_bias(output, self.out_proj.bias)
        if self.batch_first:
            output = output.transpose(0, 1)
        return output, self._all_weights(weights, average_attn_weights)

    def _batch_first_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Return query, key and value as (batch, time, width).

        Inputs that are one tensor stay one: then the region copies it, or gathers it, once.
        """
        inputs = (query, key, value)
        if self.batch_first:
            return list(inputs)
        transposed = {id(x): x.transpose(0, 1) for x in inputs}
        return [transposed[id(x)] for x in inputs]

    def _attend(
        self, inputs: list[Tensor], mask: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return this rank's heads, and their weights if they are needed.

        Heads are (batch, heads/T, time, head width), weights (batch, heads/T, time, key time).
        """
        axis = self.region.axis
        query, key, value = self._project(inputs)
        rate = self.dropout if self.training else 0.0
        if not need_weights:
            with GlobalDropout(axis):
                return F.scaled_dot_product_attention(query, key, value, mask, rate), None
        scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
        weights = (scores if mask is None else scores + mask).softmax(-1)
        if rate:
            weights = weights * dropout_factors(weights, rate, axis)
        return weights @ value, weights

    def _project(self, inputs: list[Tensor]) -> list[Tensor]:
        """Return this rank's heads of query, key and value."""
        axis = self.region.axis
        weights = regroup_qkv(local_shard(self.in_proj_weight), axis, 3).chunk(3)
        biases: tuple[Tensor | None, ...] = (None, None, None)
        if self.in_proj_bias is not None:
            biases = regroup_qkv(local_shard(self.in_proj_bias), axis, 3).chunk(3)
        projected = []
        for x, weight, bias in zip(inputs, weights, biases, strict=True):
            y = self.region.enter(x).linear(weight, bias)
            projected.append(y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2))
        return projected

    def _merge_masks(
        self, query: Tensor, padding: Tensor | None, mask: Tensor | None
    ) -> Tensor | None:
        """Return both masks as one that is added to scores, for this rank's heads; or None."""
        merged = None
        if mask is not None:
            merged = _additive_mask(mask, query.dtype)
            if mask.dim() == 3:  # (batch x heads, time, time): one mask for each head
                by_head = merged.unflatten(0, (-1, self.num_heads))
                merged = local_slice(by_head, self.region.axis, 1)
        if padding is not None:
            additive = _additive_mask(padding, query.dtype)[:, None, None, :]
            merged = additive if merged is None else merged + additive
        return merged

    def _all_weights(self, weights: Tensor | None, is_average: bool) -> Tensor | None:
        """Return the weights of all heads, or their mean, on every rank. Collective."""
        if weights is None:
            return None
        axis = self.region.axis
        if is_average:
            return reduce_from_region(weights.sum(1) / self.num_heads, axis)
        # A sum with zeros for other ranks' heads: as a gather, and differentiable.
        padded = weights.new_zeros(len(weights), self.num_heads, *weights.shape[2:])
        local_slice(padded, axis, 1).copy_(weights)
        return reduce_from_region(padded, axis)


def _additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a boolean mask as 0 and -inf, another one in `dtype`."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, -torch.inf)
