"""A tensor that lies in slices of the sequence: what is done token by token, each rank does for its
own tokens.

      x          t0 t1 t2 t3 t4          one device
      rank 0     t0 t1 t2                T = 2: LayerNorm, dropout, residual additions see these
      rank 1              t3 t4          the last ranks have less where T does not divide

It has the shape of the whole, and computes like the whole. Functions that are known to take each
token by itself run
on slices: `token_functions.py` says which, `token_by_token.py` what follows forward and backward.
Any other function
gets the whole, gathered: slower, and as exact. What is whole beside it stays whole, and gets a
whole gradient. Random numbers are drawn for all tokens, of which a rank keeps its own.

Source: Korthikanti et al., arXiv:2205.05198, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.axis import Axis
from shoal.comm.mappings import all_gather_dim, local_slice
from shoal.errors import StrategyRefused
from shoal.platform.torch_private.pytree import tree_leaves, tree_map, tree_map_only
from shoal.platform.torch_private.subclasses import (
    DisableTorchFunctionSubclass,
    make_wrapper_subclass,
)
from shoal.platform.torch_private.tensor_state import base, version
from shoal.strategies.tensor.sequence_functions import DESCRIBING, IN_PLACE, PASS_THROUGH, SPECIAL


class SequenceParallelTensor(Tensor):
    """A tensor of which this rank has `own`, its slice along dimension `along`.

    Attributes:
        order: dimensions as they lie in memory, the outermost first: dropout draws in that order.
    """

    local: Tensor
    axis: Axis
    shard_dim: int
    order: tuple[int, ...]
    _live_views: tuple[tuple[Tensor, int], ...] = ()

    @staticmethod
    def of(
        own: Tensor, axis: Axis, along: int, length: int, order: Sequence[int] | None = None
    ) -> SequenceParallelTensor:
        """Args: length: of the whole along `along`."""
        shape = (*own.shape[:along], length, *own.shape[along + 1 :])
        order = tuple(range(own.dim())) if order is None else tuple(order)
        strides, step = [0] * len(shape), 1
        for dim in reversed(order):
            strides[dim], step = step, step * max(shape[dim], 1)
        made = make_wrapper_subclass(
            SequenceParallelTensor,
            shape,
            strides=tuple(strides),
            dtype=own.dtype,
            device=own.device,
        )
        made.local, made.axis, made.shard_dim, made.order = own.detach(), axis, along, order
        found: SequenceParallelTensor = made
        return found

    def like(self, own: Tensor) -> SequenceParallelTensor:
        """Another, of the same tokens."""
        return SequenceParallelTensor.of(
            own, self.axis, self.shard_dim, self.shape[self.shard_dim], self.order
        )

    def gathered(self) -> Tensor:
        """The whole, on every rank, without a gradient. Collective."""
        length, place = self.shape[self.shard_dim], self.order.index(self.shard_dim)
        whole = all_gather_dim(self.local.permute(self.order), self.axis, place, length)
        # No view in the eyes of autograd: what follows may write into it.
        return whole.permute([self.order.index(dim) for dim in range(self.dim())]).detach()

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """What it is made of, for whoever counts memory."""
        return ["local"], (self.axis, self.shard_dim, self.shape[self.shard_dim], self.order)

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, Tensor], rest: Any, shape: Any, strides: Any
    ) -> SequenceParallelTensor:
        return SequenceParallelTensor.of(parts["local"], *rest)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Without asking the other ranks."""
        return f"SequenceSlices(shape={tuple(self.shape)}, of which own={tuple(self.local.shape)}, along={self.shard_dim})"

    def __format__(self, _: str) -> str:
        return repr(self)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func in DESCRIBING:
            with DisableTorchFunctionSubclass():
                return func(*args, **options)
        for item in tree_leaves((args, options)):
            if isinstance(item, SequenceParallelTensor):
                item._check_views_unwritten()
        alone = all(issubclass(kind, (SequenceParallelTensor, nn.Parameter)) for kind in types)
        if alone and func in SPECIAL and isinstance(args[0], SequenceParallelTensor):
            return SPECIAL[func](*args, **options)
        changes_another = func in IN_PLACE and not isinstance(args[0], SequenceParallelTensor)
        if not alone or changes_another or func not in PASS_THROUGH:
            return _run_on_full(func, args, options)
        if torch.is_grad_enabled():
            args, options = tree_map_only(Tensor, _with_whole_gradient, (args, options))
        with DisableTorchFunctionSubclass():
            return func(*args, **options)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        from shoal.strategies.tensor.sequence_dispatch import run  # which makes more of them

        return run(func, args, kwargs or {})

    def _check_views_unwritten(self) -> None:
        """Of wholes that were gathered, those that somebody has views of: the views are not of
        this tensor.
        """
        if any(version(whole) != known for whole, known in self._live_views):
            raise StrategyRefused(_written("a view of it"))


def full_tensor(x: Any) -> Any:
    """The whole of what lies in slices of the sequence, differentiable; anything else as it is.
    Collective.
    """
    return _ToFull.apply(x) if isinstance(x, SequenceParallelTensor) else x


def gather_all(nest: Any) -> Any:
    """`whole_of` for every tensor of a nest. Collective."""
    return tree_map(full_tensor, nest)


def _run_on_full(func: Any, args: Any, options: Any) -> Any:
    """For a function that may look at several tokens at once. What it writes there would be
    lost, and is refused.
    """
    taken: list[tuple[SequenceParallelTensor, Tensor, int]] = []

    def whole(item: SequenceParallelTensor) -> Tensor:
        found: Tensor = full_tensor(
            item
        )  # each time anew: one that was gathered without gradients has none to pass on
        taken.append((item, found, version(found)))
        return found

    args, options = tree_map_only(SequenceParallelTensor, whole, (args, options))
    result = func(*args, **options)
    for item, found, known in taken:
        if version(found) != known:
            raise StrategyRefused(_written(getattr(func, "__name__", str(func))))
        if any(isinstance(leaf, Tensor) and _shares(leaf, found) for leaf in tree_leaves(result)):
            item._live_views += ((found, known),)
    return result


def _shares(view: Tensor, whole: Tensor) -> bool:
    return view is whole or base(view) is whole


def _written(what: str) -> str:
    return (
        f"sequence: {what} writes into a tensor that lies in slices of the sequence, where it "
        "would be lost. Write a "
        "new tensor, x = x + y for x += y say, or leave out sequence."
    )


def _with_whole_gradient(x: Tensor) -> Tensor:
    """Of what is whole, beside what lies in slices."""
    if isinstance(x, SequenceParallelTensor) or not x.requires_grad:
        return x
    found: Tensor = _FullGradient.apply(x)
    return found


def gathered_gradient(gradient: Tensor) -> Tensor:
    """A gradient as a whole, gathered where it lies in slices. Collective."""
    return gradient.gathered() if isinstance(gradient, SequenceParallelTensor) else gradient


class GatherForward(torch.autograd.Function):
    """Gathers slices in the forward pass. What derives from it says what a rank's gradient is."""

    @staticmethod
    def forward(ctx: Any, x: SequenceParallelTensor) -> Tensor:
        ctx.axis, ctx.shard_dim, ctx.order = x.axis, x.shard_dim, x.order
        return x.gathered()


class _ToFull(GatherForward):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        own = local_slice(gradient, ctx.axis, ctx.shard_dim)
        return SequenceParallelTensor.of(
            own, ctx.axis, ctx.shard_dim, gradient.shape[ctx.shard_dim], ctx.order
        )


class _FullGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gathered_gradient(gradient)
