"""Rules for sequence parallel tensors: one for each operator that autograd calls.

add, mul, gelu, its backward, ...   each rank for its tokens; of a replicated tensor, too
sum over other dims                 each rank for its tokens
sum over the sequence               each rank for its tokens, then the sum over ranks: replicated
LayerNorm, backward                 x: each rank for its tokens; weight, bias: the sum over ranks
all others                          gathered, and computed alike by every rank

A rule takes (func, args, options) and returns NotImplemented where it does not apply. The operator
then runs on gathered tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.comm.axis import Axis
from shoal.comm.mappings import local_slice
from shoal.errors import StrategyRefused
from shoal.platform.tensors import flatten_tensors, unflatten_tensors
from shoal.platform.torch_private.pytree import tree_leaves, tree_map_only
from shoal.platform.torch_private.tensor_state import ATEN_TO_COPY, ATEN_UNSAFE_VIEW, schema_of
from shoal.strategies.tensor.sequence import SequenceParallelTensor

aten = torch.ops.aten


def run(func: Any, args: Any, options: Any) -> Any:
    """Run an operator with sequence parallel arguments. Collective, unless it is tokenwise."""
    rule = RULES.get(func)
    if rule is None and _is_elementwise(func):
        rule = _elementwise
    result = NotImplemented if rule is None else rule(func, args, options)
    return _run_gathered(func, args, options) if result is NotImplemented else result


def _run_gathered(func: Any, args: Any, options: Any) -> Any:
    """Run an operator on gathered tensors. Collective.

    Raises:
        StrategyRefused: it writes into a gathered tensor, where the write would be lost.
    """
    written = tree_leaves(_written_arguments(func, args, options))
    if any(isinstance(leaf, SequenceParallelTensor) for leaf in written):
        raise StrategyRefused(
            f"sequence: {func} writes into a tensor that lies in slices of the sequence. Write a "
            "new tensor, or leave out sequence."
        )
    args, options = tree_map_only(
        SequenceParallelTensor, SequenceParallelTensor.gathered, (args, options)
    )
    return func(*args, **options)


def _written_arguments(func: Any, args: Any, options: Any) -> list[Any]:
    """Return the arguments that an operator writes into."""
    schema = schema_of(func)
    if not schema.is_mutable:
        return []
    written = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            is_positional = position < len(args)
            written.append(args[position] if is_positional else options.get(argument.name))
    return written


def _is_elementwise(func: Any) -> bool:
    """Return True for operators that compute each entry by itself and draw no random numbers."""
    return torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags


class _TokenLayout(NamedTuple):
    """Layout of the tokens in the arguments of an elementwise operator.

    Tensors are broadcast from their last dims, so the dim of tokens is counted from there.
    """

    axis: Axis
    dim_from_last: int  # 1 is the last dim
    length: int  # of the full sequence

    def fits(self, x: Any) -> bool:
        """Return True for a sequence parallel tensor of this layout."""
        return (
            isinstance(x, SequenceParallelTensor)
            and x.dim() - x.shard_dim == self.dim_from_last
            and x.shape[x.shard_dim] == self.length
        )

    def local(self, x: Tensor) -> Tensor:
        """Return this rank's tokens; a tensor that is broadcast over tokens as it is."""
        if isinstance(x, SequenceParallelTensor):
            if self.fits(x):
                return x.local
            x = x.gathered()
        if x.dim() < self.dim_from_last or x.shape[-self.dim_from_last] != self.length:
            return x
        return local_slice(x, self.axis, x.dim() - self.dim_from_last)


def _elementwise(func: Any, args: Any, options: Any) -> Any:
    """Compute this rank's tokens of an elementwise operator.

    The result must have the tokens of the longest argument: then each rank has all it needs. An
    operator in place must write into an argument that has these tokens.
    """
    tensors = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)]
    sharded = [x for x in tensors if isinstance(x, SequenceParallelTensor)]
    # One of length 1 may be broadcast over the tokens of another.
    longest = max(sharded, key=lambda x: x.shape[x.shard_dim])
    layout = _TokenLayout(
        longest.axis, longest.dim() - longest.shard_dim, longest.shape[longest.shard_dim]
    )
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    if shape[-layout.dim_from_last] != layout.length:
        return NotImplemented
    written = _written_arguments(func, args, options)
    if written and not (written[0] is args[0] and layout.fits(args[0])):
        return NotImplemented

    local_args, local_options = tree_map_only(Tensor, layout.local, (args, options))
    local = func(*local_args, **local_options)
    if written:
        # It has written into the local tensor of the first argument.
        return args[0]
    # Where nothing was transposed, the result is contiguous: no need to ask torch.
    is_contiguous = all(_is_contiguous(tensor) for tensor in tensors)
    memory_order = None if is_contiguous else _result_memory_order(func, args, options)
    shard_dim = len(shape) - layout.dim_from_last
    return SequenceParallelTensor.from_local(
        local, layout.axis, shard_dim, layout.length, memory_order
    )


def _is_contiguous(tensor: Tensor) -> bool:
    """Return True if the full tensor is contiguous; the local one may be a slice."""
    if isinstance(tensor, SequenceParallelTensor):
        return tensor.memory_order == tuple(range(tensor.dim()))
    return tensor.is_contiguous()


def _result_memory_order(func: Any, args: Any, options: Any) -> tuple[int, ...]:
    """Return how the result would lie in memory on one device.

    torch has rules of its own for that, so it is asked with tensors on the meta device.
    """

    def to_meta(x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    meta_args, meta_options = tree_map_only(Tensor, to_meta, (args, options))
    result = func(*meta_args, **meta_options)
    return tuple(sorted(range(result.dim()), key=lambda dim: -result.stride(dim)))


def _copy_like(func: Any, args: Any, options: Any) -> Any:
    """Run copies, zeros_like and the like: the result has the same shape and order of dims."""
    x = args[0]
    local = func(x.local, *args[1:], **options)
    if options.get("memory_format") is torch.contiguous_format:
        length = x.shape[x.shard_dim]
        return SequenceParallelTensor.from_local(local, x.axis, x.shard_dim, length)
    return x.like(local)


def _view(func: Any, args: Any, options: Any) -> Any:
    """Run a view that keeps the shape. Others may merge tokens with another dim."""
    x, shape = args
    sizes = [
        old_size if new_size == -1 else new_size
        for new_size, old_size in zip(shape, x.shape, strict=False)
    ]
    if sizes != [*x.shape] or len(shape) != x.dim():
        return NotImplemented
    return x.like(x.local.view(x.local.shape))


def _transpose(func: Any, args: Any, options: Any) -> Any:
    """Swap two dims, in the layout too; no token leaves its rank."""
    x, first, second = args
    new_dims = [*range(x.dim())]
    new_dims[first], new_dims[second] = new_dims[second], new_dims[first]
    memory_order = [new_dims[dim] for dim in x.memory_order]
    local = x.local.transpose(first, second)
    length = x.shape[x.shard_dim]
    return SequenceParallelTensor.from_local(
        local, x.axis, new_dims[x.shard_dim], length, memory_order
    )


def _expand(func: Any, args: Any, options: Any) -> Any:
    """Broadcast to more samples or a wider last dim; new dims come first."""
    x, shape = args
    shard_dim = x.shard_dim + len(shape) - x.dim()
    length = x.shape[x.shard_dim]
    if shape[shard_dim] not in (-1, length):
        return NotImplemented
    local_shape = list(shape)
    local_shape[shard_dim] = x.local.shape[x.shard_dim]
    return SequenceParallelTensor.from_local(
        x.local.expand(*local_shape), x.axis, shard_dim, length
    )


def _sum(func: Any, args: Any, options: Any) -> Any:
    """Sum over some dims. A sum over the sequence is replicated. Collective only then."""
    x = args[0]
    local = func(x.local, *args[1:], **options)
    if x.shard_dim in _reduced_dims(args):
        return x.axis.all_reduce(local.contiguous())
    return _without_reduced_dims(x, local, args)


def _mean(func: Any, args: Any, options: Any) -> Any:
    """Average over dims other than the sequence."""
    x = args[0]
    # Ranks may have different numbers of tokens, so a mean of their means would be wrong.
    if x.shard_dim in _reduced_dims(args):
        return NotImplemented
    return _without_reduced_dims(x, func(x.local, *args[1:], **options), args)


def _reduced_dims(args: Any) -> set[int]:
    """Return the dims of a sum or a mean: argument 1, all if it is absent or empty."""
    x = args[0]
    dims = args[1] if len(args) > 1 else None
    return {dim % x.dim() for dim in dims or range(x.dim())}


def _without_reduced_dims(
    x: SequenceParallelTensor, local: Tensor, args: Any
) -> SequenceParallelTensor:
    """Wrap a sum or a mean of `x` over dims other than that of tokens."""
    keeps_dims = len(args) > 2 and args[2]
    reduced = _reduced_dims(args)
    remaining = [dim for dim in range(x.dim()) if keeps_dims or dim not in reduced]
    memory_order = [remaining.index(dim) for dim in x.memory_order if dim in remaining]
    shard_dim = remaining.index(x.shard_dim)
    length = x.shape[x.shard_dim]
    return SequenceParallelTensor.from_local(local, x.axis, shard_dim, length, memory_order)


def _sum_of_all(func: Any, args: Any, options: Any) -> Any:
    """Sum over all dims. Collective."""
    return args[0].axis.all_reduce(func(args[0].local, **options))


def _layer_norm(func: Any, args: Any, options: Any) -> Any:
    """Return the normalized tensor, the mean and the reciprocal standard deviation of tokens."""
    x, normalized_shape, *rest = args
    if not _is_tokenwise_norm(x, normalized_shape, rest[:2]):
        return NotImplemented
    length = x.shape[x.shard_dim]
    return tuple(
        SequenceParallelTensor.from_local(local, x.axis, x.shard_dim, length)
        for local in func(x.local, normalized_shape, *rest)
    )


def _layer_norm_backward(func: Any, args: Any, options: Any) -> Any:
    """Return the gradients of x, weight and bias; None for those that the mask excludes.

    Weight and bias are replicated, so each rank has a part of their gradients. Collective.
    """
    gradient, x, normalized_shape, mean, rstd, weight, bias, output_mask = args
    if not _is_tokenwise_norm(x, normalized_shape, (weight, bias)):
        return NotImplemented
    local_gradient, local_x, local_mean, local_rstd = (
        _local_tokens(tensor, x) for tensor in (gradient, x, mean, rstd)
    )
    x_gradient, *partial_gradients = func(
        local_gradient, local_x, normalized_shape, local_mean, local_rstd, weight, bias, output_mask
    )
    if x_gradient is not None:
        length = x.shape[x.shard_dim]
        x_gradient = SequenceParallelTensor.from_local(x_gradient, x.axis, x.shard_dim, length)
    return x_gradient, *_sum_over_ranks(partial_gradients, x.axis)


def _sum_over_ranks(tensors: list[Tensor | None], axis: Axis) -> list[Tensor | None]:
    """Return the sums over ranks, in one message. Collective."""
    present = [tensor for tensor in tensors if tensor is not None]
    if not present:
        return tensors
    sums = iter(unflatten_tensors(axis.all_reduce(flatten_tensors(present)), present))
    return [None if tensor is None else next(sums).to(tensor.dtype) for tensor in tensors]


def _local_tokens(tensor: Tensor, like: SequenceParallelTensor) -> Tensor:
    """Return this rank's tokens of a tensor with the tokens of `like`, sharded or not."""
    if isinstance(tensor, SequenceParallelTensor):
        if tensor.shard_dim == like.shard_dim:
            return tensor.local
        tensor = tensor.gathered()
    return local_slice(tensor, like.axis, like.shard_dim)


def _is_tokenwise_norm(x: Any, normalized_shape: Any, parameters: Any) -> bool:
    """Return True if the norm is over dims behind that of tokens, with replicated parameters."""
    if any(isinstance(parameter, SequenceParallelTensor) for parameter in parameters):
        return False
    return isinstance(x, SequenceParallelTensor) and x.shard_dim < x.dim() - len(normalized_shape)


Rule = Callable[[Any, Any, Any], Any]
RULES: dict[Any, Rule] = {
    aten.detach.default: _copy_like,
    aten.alias.default: _copy_like,
    aten.clone.default: _copy_like,
    ATEN_TO_COPY: _copy_like,
    aten.zeros_like.default: _copy_like,
    aten.ones_like.default: _copy_like,
    aten.empty_like.default: _copy_like,
    aten.view.default: _view,
    ATEN_UNSAFE_VIEW: _view,
    aten.reshape.default: _view,
    aten.transpose.int: _transpose,
    aten.expand.default: _expand,
    aten.sum.dim_IntList: _sum,
    aten.sum.default: _sum_of_all,
    aten.mean.dim: _mean,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
}
