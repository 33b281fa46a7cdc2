"""Column and row parallel layers, linear ones and convolutions, the layers between them, and
nn.MultiheadAttention that is divided between heads.

    column   each rank has some outputs   weight (out/T, in), bias (out/T)    full x -> shard of y
    row      each rank has some inputs    weight (out, in/T), bias (out)      shard of x -> full y

    x ──> column ──> GELU ──> row ──> sum         one sum of y forward, one of x's gradient backward

GPT-2's `Conv1D` is a linear layer with a transposed weight:

    column   weight (in, out/T), bias (out/T)        row   weight (in/T, out), bias (out)

A fused column layer holds query, key and value in one matrix, whose rows are regrouped:

    full       q0 q1 k0 k1 v0 v1          rows of heads 0 and 1
    rank 0     q0 q1 k0                   stored: contiguous, so that every checkpoint has the
    rank 1     k1 v0 v1                   layout of the full model
                  ⇅ all-to-all
    rank 0     q0 k0 v0                   used: all rows of this rank's heads
    rank 1     q1 k1 v1

Each rank sends at most its own rows, 1/T of the matrix, in each forward and backward pass.

Convolutions and norms are divided along channels:

    x ──> column ──> BatchNorm ──> ReLU ──> row ──> sum       statistics are those of one channel,
                                                              so they need no communication

DTensor's convolution is no alternative: with a weight that is sharded on output channels, it
declares its output replicated, at half the channels, without an error (torch 2.13,
pytorch#186129).

Source: Shoeybi et al., arXiv:1909.08053, section 3.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.comm.axis import Axis
from shoal.comm.mappings import conjugate, local_slice, reduce_from_region
from shoal.errors import UsageError
from shoal.platform.torch_private.module_state import own_buffers, own_parameters
from shoal.strategies.tensor.candidates import CONVOLUTIONS
from shoal.strategies.tensor.dropout_rng import GlobalDropout, dropout_factors
from shoal.strategies.tensor.region import Region, local_part, local_shard, sum_of_ranks


class _ColumnParallel:
    """Computes this rank's shard of the outputs.

    Attributes: parts: matrices in one: 3 where query, key and value stand one below the other.
    """

    region: Region
    parts: int
    is_transposed: ClassVar[bool] = False

    def forward(self: Any, x: Tensor) -> Tensor:
        weight, bias = _oriented(self), local_shard(self.bias)
        if self.parts > 1:
            weight = regroup_qkv(weight, self.region.axis, self.parts)
            bias = None if bias is None else regroup_qkv(bias, self.region.axis, self.parts)
        y: Tensor = self.region.enter(x).linear(weight, bias)
        return y


class _RowParallel:
    """Takes this rank's shard of the inputs; the sum over ranks is the output.

    Attributes:
        shard_dim: the sequence dimension of the output if it is sequence parallel; else None.
    """

    region: Region
    shard_dim: int | None
    is_transposed: ClassVar[bool] = False

    def forward(self: Any, x: Tensor) -> Tensor:
        self.region.check_inside()
        partial = F.linear(x, _oriented(self))
        return add_bias(sum_of_ranks(partial, self.region.axis, self.shard_dim), self.bias)


def _oriented(layer: Any) -> Tensor:
    """Return this rank's shard of a weight as (out, in)."""
    weight: Tensor = local_shard(layer.weight)
    return weight.t() if layer.is_transposed else weight


class ColumnParallelLinear(_ColumnParallel, nn.Linear):
    """Column parallel nn.Linear."""


class RowParallelLinear(_RowParallel, nn.Linear):
    """Row parallel nn.Linear."""


class ColumnParallelGPT2Conv1D(_ColumnParallel, nn.Module):
    """Column parallel `Conv1D` of GPT-2; of a fused one the matrices stand side by side."""

    is_transposed = True


class RowParallelGPT2Conv1D(_RowParallel, nn.Module):
    """Row parallel `Conv1D` of GPT-2."""

    is_transposed = True


def add_bias(y: Tensor, bias: Tensor | None, image_dims: int = 0) -> Tensor:
    """Add a replicated bias after the sum over ranks, so that it counts once.

    Args: image_dims: of `y`, behind that of channels.
    """
    if bias is None:
        return y
    added: Tensor = local_part(bias).to(y.dtype)
    return y + (added.view(-1, *[1] * image_dims) if image_dims else added)


class ShardedDropout(nn.Dropout):
    """Draws for all hidden units, as one device does, and keeps this rank's shard.

    So all ranks draw the same random numbers, and their generators stay equal.
    """

    axis: Axis
    dim: int
    region: Region

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        self.region.check_inside()
        return x * dropout_factors(x, self.p, self.axis, self.dim)


all_to_all = getattr(dist, "all_to_all_single")  # noqa: B009 - untyped in torch's stubs


def regroup_qkv(stored: Tensor, axis: Axis, parts: int) -> Tensor:
    """Return this rank's shard of each part, one after the other. Collective.

    Args:
        stored: (rows/T, ...), this rank's shard of all parts as they are stored.
        parts: matrices in one, 3 for query, key and value.
    """
    rows = torch.arange(len(stored) * axis.size, device="cpu")
    part = len(rows) // parts
    # For each row the rank that stores it, and the rank that computes with it.
    storing, using = rows // len(stored), rows % part // (part // axis.size)
    return conjugate(
        stored,
        lambda rows: _exchange_rows(rows, storing, using, axis),
        lambda rows: _exchange_rows(rows, using, storing, axis),
    )


def _exchange_rows(tensor: Tensor, before: Tensor, after: Tensor, axis: Axis) -> Tensor:
    """Move rows between ranks. Collective.

    Args:
        tensor: this rank's rows of those that the ranks `before` have, in ascending order.
        before, after: for each row the rank that has it, and the rank that gets it.
    """
    receivers, senders = after[before == axis.rank], before[after == axis.rank]
    # Rows travel in the order of ranks, those of two ranks in ascending order.
    send_order, receive_order = (ranks.argsort(stable=True) for ranks in (receivers, senders))
    sent = tensor[send_order.to(tensor.device)].contiguous()
    received = torch.empty_like(sent)
    counts = (ranks.bincount(minlength=axis.size).tolist() for ranks in (senders, receivers))
    all_to_all(received, sent, *counts, group=axis.group)
    return received[receive_order.argsort().to(tensor.device)]


ModuleClasses = dict[type[nn.Module], type[nn.Module]]
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm)
CHANNEL_TENSORS = {"weight", "bias", "running_mean", "running_var"}
"""Names of tensors with an entry for each channel."""


class _ColumnParallelConv:
    """Computes this rank's shard of the channels."""

    region: Region

    def forward(self: Any, x: Tensor) -> Tensor:
        y: Tensor = self._conv_forward(
            self.region.enter(x).full, local_shard(self.weight), local_shard(self.bias)
        )
        return y


class _RowParallelConv:
    """Takes this rank's shard of the channels; the output is replicated."""

    region: Region

    def forward(self: Any, x: Tensor) -> Tensor:
        self.region.check_inside()
        partial_sum = self._conv_forward(x, local_shard(self.weight), None)
        y = reduce_from_region(partial_sum, self.region.axis)
        return add_bias(y, self.bias, len(self.kernel_size))


class _ShardedChannels:
    """Computes this rank's channels as its class does: it computes each channel, or group, alone.

    A convolution in groups, BatchNorm, GroupNorm.
    """

    region: Region

    def forward(self: Any, x: Tensor) -> Tensor:
        self.region.check_inside()
        tables: tuple[dict[str, Any], ...] = (own_parameters(self), own_buffers(self))
        whole = [
            (table, key, table[key]) for table in tables for key in CHANNEL_TENSORS & table.keys()
        ]
        try:
            for table, key, tensor in whole:
                table[key] = local_shard(tensor)
            y: Tensor = self.full_class.forward(self, x)
            return y
        finally:
            for table, key, tensor in whole:
                table[key] = tensor


def _classes(mixin: type, *kinds: type[nn.Module]) -> ModuleClasses:
    """Return for each kind of module a class that computes as `mixin` says."""
    name = mixin.__name__.removeprefix("_")
    return {kind: type(f"{name} of {kind.__name__}", (mixin, kind), {}) for kind in kinds}


COLUMN_CLASSES: ModuleClasses = {
    nn.Linear: ColumnParallelLinear,
    **_classes(_ColumnParallelConv, *CONVOLUTIONS),
}
ROW_CLASSES: ModuleClasses = {
    nn.Linear: RowParallelLinear,
    **_classes(_RowParallelConv, *CONVOLUTIONS),
}
BETWEEN_CLASSES: ModuleClasses = {
    nn.Dropout: ShardedDropout,
    **_classes(_ShardedChannels, *CONVOLUTIONS, *NORMS),
}


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
            partial = F.linear(merged, local_shard(self.out_proj.weight))
            output = sum_of_ranks(partial, self.region.axis, 0 if self.sequence else None)
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
