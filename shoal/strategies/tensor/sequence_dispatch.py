"""What follows for slices of the sequence from each operator that autograd calls, forward and
backward.

add, mul, gelu, its backward, ...      each rank for its tokens; of what is whole beside them, it takes its tokens
sum over other dimensions              each rank for its tokens
sum over the sequence                  each rank for its tokens, then the sum over ranks: whole
LayerNorm, backward                    x: each rank for its tokens; weight and bias: the sum over ranks
all else                               gathered, and computed alike by every rank
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

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
    """An operator of which an argument lies in slices. Collective, for all that is not token by
    token.
    """
    rule = RULES.get(func) or (_each_entry if _takes_each_entry(func) else None)
    found = NotImplemented if rule is None else rule(func, args, options)
    return _on_wholes(func, args, options) if found is NotImplemented else found


def _on_wholes(func: Any, args: Any, options: Any) -> Any:
    if any(
        isinstance(leaf, SequenceParallelTensor)
        for leaf in tree_leaves(_written_to(func, args, options))
    ):
        raise StrategyRefused(
            f"sequence: {func} writes into a tensor that lies in slices of the sequence. Write a "
            "new tensor, or leave "
            "out sequence."
        )
    args, options = tree_map_only(
        SequenceParallelTensor, SequenceParallelTensor.gathered, (args, options)
    )
    return func(*args, **options)


def _written_to(func: Any, args: Any, options: Any) -> list[Any]:
    """The arguments that an operator writes into."""
    schema = schema_of(func)
    if not schema.is_mutable:
        return []
    arguments = [*enumerate(schema.arguments)]
    written = [
        (place, a.name)
        for place, a in arguments
        if a.alias_info is not None and a.alias_info.is_write
    ]
    return [args[place] if place < len(args) else options.get(name) for place, name in written]


def _takes_each_entry(func: Any) -> bool:
    return torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags


def _each_entry(func: Any, args: Any, options: Any) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)]
    like = max(
        (t for t in tensors if isinstance(t, SequenceParallelTensor)),
        key=lambda t: t.shape[t.along],
    )
    behind, length = like.dim() - like.along, like.shape[like.along]
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    if shape[-behind] != length:
        return NotImplemented
    writes = _written_to(func, args, options)
    if writes and not (writes[0] is args[0] and _has_layout(args[0], behind, length)):
        return NotImplemented

    own = partial(_own_tokens, axis=like.axis, behind=behind, length=length)
    found = func(*tree_map_only(Tensor, own, args), **tree_map_only(Tensor, own, options))
    if writes:
        return args[0]
    order = None if all(_in_order(tensor) for tensor in tensors) else _order(func, args, options)
    return SequenceParallelTensor.of(found, like.axis, len(shape) - behind, length, order)


def _own_tokens(tensor: Tensor, axis: Axis, behind: int, length: int) -> Tensor:
    """Take this rank's tokens of a tensor; one without a dimension of tokens stays as it is.

    Args:
        behind: place of the dimension of tokens, counted from the last.
        length: of the sequence.
    """
    if isinstance(tensor, SequenceParallelTensor):
        if _has_layout(tensor, behind, length):
            return tensor.local
        tensor = tensor.gathered()
    spread = tensor.dim() < behind or tensor.shape[-behind] != length
    return tensor if spread else local_slice(tensor, axis, tensor.dim() - behind)


def _has_layout(x: Tensor, behind: int, length: int) -> bool:
    """In slices of a sequence of this length, in the dimension that is this far from the last."""
    return (
        isinstance(x, SequenceParallelTensor)
        and x.dim() - x.along == behind
        and x.shape[x.along] == length
    )


def _in_order(tensor: Tensor) -> bool:
    if isinstance(tensor, SequenceParallelTensor):
        return tensor.order == tuple(range(tensor.dim()))
    return tensor.is_contiguous()


def _order(func: Any, args: Any, options: Any) -> tuple[int, ...]:
    """How the result lies in memory on one device: torch has rules of its own for that."""

    def empty(x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    found = func(*tree_map_only(Tensor, empty, args), **tree_map_only(Tensor, empty, options))
    return tuple(sorted(range(found.dim()), key=lambda dim: -found.stride(dim)))


def _own_like(tensor: Tensor, like: SequenceParallelTensor) -> Tensor:
    """This rank's tokens of a tensor of the same shape, however it lies."""
    if isinstance(tensor, SequenceParallelTensor) and tensor.along == like.along:
        return tensor.local
    whole = tensor.gathered() if isinstance(tensor, SequenceParallelTensor) else tensor
    return local_slice(whole, like.axis, like.along)


def _same(func: Any, args: Any, options: Any) -> Any:
    """Copies, zeros and the like: of the same shape, in the same order."""
    x = args[0]
    found = func(x.local, *args[1:], **options)
    contiguous = options.get("memory_format") is torch.contiguous_format
    return (
        x.like(found)
        if not contiguous
        else SequenceParallelTensor.of(found, x.axis, x.shard_dim, x.shape[x.shard_dim])
    )


def _view(func: Any, args: Any, options: Any) -> Any:
    x, shape = args
    sizes = [have if want == -1 else want for want, have in zip(shape, x.shape, strict=False)]
    return (
        x.like(x.local.view(x.local.shape))
        if sizes == [*x.shape] and len(shape) == x.dim()
        else NotImplemented
    )


def _transpose(func: Any, args: Any, options: Any) -> Any:
    x, first, second = args
    places = [*range(x.dim())]
    places[first], places[second] = places[second], places[first]
    order = [places[dim] for dim in x.order]
    return SequenceParallelTensor.of(
        x.local.transpose(first, second), x.axis, places[x.shard_dim], x.shape[x.shard_dim], order
    )


def _expand(func: Any, args: Any, options: Any) -> Any:
    x, shape = args
    along = x.shard_dim + len(shape) - x.dim()
    if shape[along] not in (-1, x.shape[x.shard_dim]):
        return NotImplemented
    own = x.local.expand(*shape[:along], x.local.shape[x.shard_dim], *shape[along + 1 :])
    return SequenceParallelTensor.of(own, x.axis, along, x.shape[x.shard_dim])


def _sum(func: Any, args: Any, options: Any) -> Any:
    x, found = args[0], func(args[0].local, *args[1:], **options)
    if x.shard_dim in _dims_of(args):
        return x.axis.all_reduce(found.contiguous())
    return _remaining_dims(x, found, args)


def _mean(func: Any, args: Any, options: Any) -> Any:
    x = args[0]
    return (
        NotImplemented
        if x.shard_dim in _dims_of(args)
        else _remaining_dims(x, func(x.local, *args[1:], **options), args)
    )


def _dims_of(args: Any) -> set[int]:
    """Those that a sum or a mean goes over."""
    x, dims = args[0], args[1] if len(args) > 1 else None
    return {dim % x.dim() for dim in dims or range(x.dim())}


def _remaining_dims(x: SequenceParallelTensor, found: Tensor, args: Any) -> SequenceParallelTensor:
    """What is left of `x` after a sum over dimensions that are none of its sequence."""
    keeps = len(args) > 2 and args[2]
    left = [dim for dim in range(x.dim()) if keeps or dim not in _dims_of(args)]
    order = [left.index(dim) for dim in x.order if dim in left]
    return SequenceParallelTensor.of(found, x.axis, left.index(x.along), x.shape[x.along], order)


def _sum_of_all(func: Any, args: Any, options: Any) -> Any:
    return args[0].axis.all_reduce(func(args[0].local, **options))


def _layer_norm(func: Any, args: Any, options: Any) -> Any:
    x, normalized, *rest = args
    if not _normalizes_tokens(x, normalized, rest[:2]):
        return NotImplemented
    length = x.shape[x.shard_dim]
    return tuple(
        SequenceParallelTensor.of(found, x.axis, x.shard_dim, length)
        for found in func(x.local, normalized, *rest)
    )


def _layer_norm_backward(func: Any, args: Any, options: Any) -> Any:
    gradient, x, normalized, mean, scale, weight, bias, wanted = args
    if not _normalizes_tokens(x, normalized, (weight, bias)):
        return NotImplemented
    own = [_own_like(tensor, x) for tensor in (gradient, x, mean, scale)]
    of_x, *others = func(own[0], own[1], normalized, own[2], own[3], weight, bias, wanted)
    present = [found for found in others if found is not None]
    if present:  # in one message
        summed = iter(unflatten_tensors(x.axis.all_reduce(flatten_tensors(present)), present))
        others = [found if found is None else next(summed).to(found.dtype) for found in others]
    found_x = (
        None
        if of_x is None
        else SequenceParallelTensor.of(of_x, x.axis, x.shard_dim, x.shape[x.shard_dim])
    )
    return found_x, *others


def _normalizes_tokens(x: Any, normalized: Any, parameters: Any) -> bool:
    plain = not any(isinstance(parameter, SequenceParallelTensor) for parameter in parameters)
    return plain and isinstance(x, SequenceParallelTensor) and x.along < x.dim() - len(normalized)


RULES: dict[Any, Callable[[Any, Any, Any], Any]] = {
    **dict.fromkeys(
        (aten.detach.default, aten.alias.default, aten.clone.default, ATEN_TO_COPY), _same
    ),
    **dict.fromkeys(
        (aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default), _same
    ),
    **dict.fromkeys((aten.view.default, ATEN_UNSAFE_VIEW, aten.reshape.default), _view),
    aten.transpose.int: _transpose,
    aten.expand.default: _expand,
    aten.sum.dim_IntList: _sum,
    aten.sum.default: _sum_of_all,
    aten.mean.dim: _mean,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
}
